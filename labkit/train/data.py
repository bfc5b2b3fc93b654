"""Batches of bytes, each a pure function of (seed, step, row): any rank can make any of them, without communication.

A row is a window of seq + 1 bytes of a text; its first seq bytes are the tokens, its last seq the targets, so that
each position is asked for the byte that follows it:

    text      I t   i s   a   t r u t h         seq = 4, a window that starts at 3
                    |_______|
    tokens          i s _ a                     targets are the tokens one place on
    targets           s _ a _

Where the window of row r of step s starts is a hash of (seed, s, r). Nothing is shuffled, stored or sent, so a run that
resumes at step 1000 reads at once what it would have read, and data parallelism only cuts rows:

    global batch of step s     row 0  row 1  row 2  row 3  row 4  row 5  row 6  row 7
    dp_size = 1                rank 0 ----------------------------------------------
    dp_size = 2                rank 0 ------------------   rank 1 ------------------
    dp_size = 4                rank 0 ----  rank 1 -----   rank 2 -----  rank 3 ----

The same rows make one step whatever the number of ranks, which is why losses can be compared between layouts. Bytes
sent: none. Memory: the text is mapped, not read, and ranks of one machine share its pages. Windows are drawn with
replacement, so an "epoch" is a statement about the average only.

`packed_batch` makes rows of several documents instead, the paragraphs of the text (labkit.train.packed): which ones is
a hash of (seed, s, r) and of their number in the row, and the last one is cut where the row is full.

A vocabulary of 256 bytes needs no tokenizer and knows every language (Xue 2021, arXiv:2105.13626, section 3.1). The
text that ships is Jane Austen's Pride and Prejudice, 0.7 MB; its last tenth is kept for validation.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from labkit.train.packed import IGNORED

VOCAB = 256
SHIPPED = Path(__file__).with_name("text") / "pride_and_prejudice.txt"
VALIDATION_SHARE = 0.1
SPLITS = ("train", "validation", "all")


def batch(
    seed: int,
    step: int,
    dp_rank: int,
    dp_size: int,
    batch_size: int,
    seq: int,
    *,
    path: str | Path | None = None,
    split: str = "train",
    device: str | torch.device = "cpu",
) -> tuple[Tensor, Tensor]:
    """This rank's rows of the global batch of one step: tokens and targets, both [batch_size / dp_size, seq] int64.

    `batch_size` counts the rows of all ranks together; rank r holds rows r * batch_size / dp_size and on. `path` is a
    text of your own, `split` one of "train", "validation", "all". Raises ValueError for a batch that cannot be cut
    evenly, a rank outside the group, and a text shorter than seq + 1 bytes."""
    rows, source = rows_of(dp_rank, dp_size, batch_size, seq), text(path, split)
    if len(source) < seq + 1:
        raise ValueError(
            f"seq={seq} needs {seq + 1} bytes of text in a row, the {split!r} part of {path or SHIPPED.name} has "
            f"{len(source)}: use a longer text or a smaller seq"
        )
    starts = torch.tensor([start(seed, step, row, len(source) - seq) for row in rows])
    windows = source.unfold(0, seq + 1, 1)[starts].to(device).long()  # goes to a GPU as bytes, an eighth of the int64
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def packed_batch(
    seed: int,
    step: int,
    dp_rank: int,
    dp_size: int,
    batch_size: int,
    seq: int,
    *,
    path: str | Path | None = None,
    split: str = "train",
    device: str | torch.device = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of packed documents: tokens, targets and documents, each [batch_size / dp_size, seq] int64.

    A document is a paragraph with the empty line after it, by which a model learns where one ends. The target of its
    last byte is -100, which does not count. Documents of a row are numbered from 0. Raises ValueError for a batch that
    cannot be cut evenly, a rank outside the group, and a text without a byte."""
    rows, source = rows_of(dp_rank, dp_size, batch_size, seq), text(path, split)
    if not len(source):
        raise ValueError(f"the {split!r} part of {path} has no byte to pack: use a longer text")
    begins = _paragraphs(split, *_file(path))
    tokens, targets, documents = (torch.empty(len(rows), seq, dtype=torch.int64) for _ in range(3))
    for place, row in enumerate(rows):
        filled = number = 0
        while filled < seq:
            chosen = hashed(f"{seed} {step} {row} {number}", len(begins) - 1)
            whole = source[begins[chosen] : begins[chosen + 1]].long()
            follows = torch.cat([whole[1:], whole.new_tensor([IGNORED])])
            window = slice(filled, filled + len(whole))  # ends at seq at the latest, as slices do
            tokens[place, window], targets[place, window] = whole[: seq - filled], follows[: seq - filled]
            documents[place, window] = number
            filled, number = filled + len(whole), number + 1
    return tokens.to(device), targets.to(device), documents.to(device)


def rows_of(dp_rank: int, dp_size: int, batch_size: int, seq: int) -> range:
    """The numbers of this rank's rows in a batch. ValueError for what `batch` refuses."""
    if batch_size < 1 or seq < 1 or dp_size < 1:
        raise ValueError(f"batch_size={batch_size}, seq={seq} and dp_size={dp_size} must each be at least 1")
    if not 0 <= dp_rank < dp_size:
        raise ValueError(f"dp_rank={dp_rank} is not one of {dp_size} ranks: 0 to {dp_size - 1}")
    if batch_size % dp_size:
        below = batch_size - batch_size % dp_size
        near = f"{below} or {below + dp_size}" if below else str(dp_size)
        raise ValueError(f"a batch of {batch_size} rows cannot be cut evenly for {dp_size} ranks; {near} would do")
    n_rows = batch_size // dp_size
    return range(dp_rank * n_rows, (dp_rank + 1) * n_rows)


def start(seed: int, step: int, row: int, n_starts: int) -> int:
    """The place at which a row's window begins, 0 to n_starts - 1."""
    return hashed(f"{seed} {step} {row}", n_starts)


def hashed(words: str, n: int) -> int:
    """A number from 0 to n - 1: a hash, equal on every machine and version."""
    digest = hashlib.blake2b(words.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % n


def text(path: str | Path | None = None, split: str = "all") -> Tensor:
    """The bytes of a text (None: the one that ships), or of a part of it.   -> [n_bytes] uint8, mapped from the file

    Validation is the last tenth, in one piece, so that no window of it was seen in training. Raises ValueError for an
    unknown split and for a file that is not there or is empty."""
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    whole = _mapped(*_file(path))
    cut = len(whole) - int(len(whole) * VALIDATION_SHARE)
    return {"train": whole[:cut], "validation": whole[cut:], "all": whole}[split]


def _file(path: str | Path | None) -> tuple[str, int, int]:
    """The name of a text, its bytes and the time of its last change. ValueError if there is none."""
    file = SHIPPED if path is None else Path(path).expanduser().resolve()
    if not file.is_file() or not file.stat().st_size:
        raise ValueError(f"no text in {file}: it is {'empty' if file.is_file() else 'not a file'}")
    return str(file), file.stat().st_size, file.stat().st_mtime_ns


@lru_cache(maxsize=8)
def _paragraphs(split: str, file: str, n_bytes: int, changed_ns: int) -> list[int]:
    """Where paragraphs begin, and where the last one ends; n + 1 numbers for n of them. The key is as in `_mapped`."""
    source = text(file, split)
    feeds = torch.nn.functional.pad(source == ord("\n"), (2, 1))  # what stands before the text, and behind it, is none
    after = feeds[:-3] & feeds[1:-2] & ~feeds[2:-1]  # two line feeds, and then another byte
    return [0, *after.nonzero().flatten().tolist(), len(source)]


@lru_cache(maxsize=8)
def _mapped(file: str, n_bytes: int, changed_ns: int) -> Tensor:
    """The file as a private map; size and time of change are in the key, so that an edited text is mapped anew."""
    return torch.from_file(file, shared=False, size=n_bytes, dtype=torch.uint8)


def encode(words: str) -> Tensor:
    """A string as tokens, its UTF-8 bytes.   -> [n_bytes] int64"""
    return torch.tensor(list(words.encode()), dtype=torch.int64)


def decode(tokens: Tensor) -> str:
    """Tokens as a string; bytes that are no UTF-8 (a model's slips, half a letter) show as U+FFFD.   [n] -> str

    Raises ValueError for ids that are no bytes and for more than one dimension."""
    if tokens.dim() > 1:
        raise ValueError(f"decode takes one row of tokens, got shape {tuple(tokens.shape)}: decode(tokens[0])")
    ids = tokens.flatten().tolist()
    wrong = [token for token in ids if not 0 <= token < VOCAB]
    if wrong:
        raise ValueError(f"{wrong[0]} is no byte: ids go from 0 to {VOCAB - 1}")
    return bytes(ids).decode(errors="replace")
