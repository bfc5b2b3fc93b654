"""Batches of bytes: the same for everybody who asks, cut evenly, and of the text that was meant."""

from __future__ import annotations

import hashlib
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

import labkit
from labkit.comm.local import run_threads
from labkit.train import data
from labkit.train.data import batch, decode, encode, packed_batch, start, text
from tests.cases import cases


def whole_batch(seed, step, dp_size, batch_size, seq, **more):
    parts = [batch(seed, step, rank, dp_size, batch_size, seq, **more) for rank in range(dp_size)]
    return [torch.cat(each) for each in zip(*parts, strict=True)]


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**40),
    step=st.integers(0, 10**6),
    dp_size=st.integers(1, 8),
    rows=st.integers(1, 4),
    seq=st.integers(1, 200),
)
def test_ranks_together_hold_the_rows_that_one_rank_would(seed, step, dp_size, rows, seq):
    """Would catch ranks that see the same rows, rows that nobody sees, and rows that depend on the layout."""
    found = whole_batch(seed, step, dp_size, dp_size * rows, seq)
    expected = batch(seed, step, 0, 1, dp_size * rows, seq)
    for each, other in zip(found, expected, strict=True):
        assert torch.equal(each, other)
        assert each.dtype == torch.int64
        assert each.shape == (dp_size * rows, seq)
        assert other.is_contiguous()


def test_ranks_of_a_group_read_without_talking():
    """Would catch a rank that needs another one, or the order in which they ask."""
    parts = run_threads(lambda group: batch(1, 2, group.rank, group.size, 8, 5)[0], 4)
    assert torch.equal(torch.cat(parts), batch(1, 2, 0, 1, 8, 5)[0])


def test_a_packed_row_is_whole_paragraphs_and_one_that_is_cut():
    """Would catch a paragraph that begins in its middle, targets from another one, an end that is asked for more, rows
    that depend on the layout, and the same rows in each step."""
    source = decode(text(split="train"))
    tokens, targets, documents = packed_batch(7, 3, 0, 1, 6, 300)
    for number in range(3):
        parts = packed_batch(7, 3, number, 3, 6, 300)
        assert all(
            map(torch.equal, parts, (whole[2 * number : 2 * number + 2] for whole in (tokens, targets, documents)))
        )
    assert not torch.equal(tokens, packed_batch(7, 4, 0, 1, 6, 300)[0])
    assert documents.max() > 0, "no row packs two: the test would see nothing"
    for row, follows, numbers in zip(tokens, targets, documents, strict=True):
        assert numbers.unique().tolist() == list(range(int(numbers.max()) + 1))
        for number in range(int(numbers.max()) + 1):
            here = numbers == number
            words, cut = decode(row[here]), number == int(numbers.max())
            assert source.startswith(words) or f"\n\n{words}" in source
            assert cut or (words.endswith("\n\n") and "\n\n" not in words.rstrip("\n"))
            assert torch.equal(follows[here][:-1], row[here][1:])
            assert cut or follows[here][-1] == -100


def test_a_text_without_an_empty_line_is_one_document(tmp_path):
    """Would catch a last paragraph that is left out, and a part without a byte that is packed forever."""
    (tmp_path / "line").write_text("abc")
    tokens, targets, documents = packed_batch(0, 0, 0, 1, 1, 7, path=tmp_path / "line", split="all")
    assert (decode(tokens[0]), documents[0].tolist()) == ("abcabca", [0, 0, 0, 1, 1, 1, 2])
    assert targets[0].tolist() == [98, 99, -100, 98, 99, -100, 98]
    with pytest.raises(ValueError, match="'validation' part"):
        packed_batch(0, 0, 0, 1, 1, 7, path=tmp_path / "line", split="validation")


def test_targets_are_the_bytes_that_follow_the_tokens():
    """Would catch targets that are the tokens themselves, or two places on."""
    source = text(split="train").tolist()
    tokens, targets = batch(3, 4, 0, 1, 6, 11)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    for row in range(6):
        begin = start(3, 4, row, len(source) - 11)
        assert tokens[row].tolist() == source[begin : begin + 11]
        assert targets[row].tolist() == source[begin + 1 : begin + 12]


def test_a_step_can_be_read_without_the_steps_before_it():
    """Would catch a stream with a hidden place, which a resumed run would lose."""
    in_order = [batch(0, step, 0, 1, 4, 8)[0] for step in range(5)]
    for step in (4, 0, 2):
        assert torch.equal(batch(0, step, 0, 1, 4, 8)[0], in_order[step])
    assert len({tuple(each.flatten().tolist()) for each in in_order}) == 5
    assert not torch.equal(batch(1, 0, 0, 1, 4, 8)[0], in_order[0])


def test_another_process_reads_the_same_rows_and_maps_the_text_once_and_late():
    """Would catch Python's hash of strings, which differs between processes, and an import that reads files."""
    code = (
        "import labkit.train.data as data\n"
        "assert data._mapped.cache_info().currsize == 0\n"
        "data.batch(0, 0, 0, 1, 1, 1)\n"
        "print(data.batch(5, 6, 1, 2, 4, 7)[0].tolist())\n"
        "assert data._mapped.cache_info().misses == 1\n"
    )
    home = Path(labkit.__file__).parents[1]
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300, cwd=home
    )
    assert found.stdout.strip() == str(batch(5, 6, 1, 2, 4, 7)[0].tolist())


def test_windows_are_spread_evenly_over_the_text():
    """Would catch a place that is never read, ends included, and a hash that clusters."""
    n_starts, n = 10, 20_000
    counts = torch.bincount(torch.tensor([start(1, step, row, n_starts) for step in range(n // 8) for row in range(8)]))
    assert len(counts) == n_starts
    deviation = (counts - n / n_starts).abs().max() / math.sqrt(n / n_starts)
    assert deviation < 5
    small = {start(0, step, 0, 3) for step in range(50)}
    assert small == {0, 1, 2}


def test_training_never_sees_the_validation_part():
    """Would catch a window that crosses the border, and a model judged on what it has learned by heart."""
    whole, train, validation = text(), text(split="train"), text(split="validation")
    assert torch.equal(torch.cat([train, validation]), whole)
    assert 0.09 < len(validation) / len(whole) < 0.11
    tokens, _ = batch(0, 0, 0, 1, 32, 50, split="validation")
    inside = bytes(validation.tolist())
    assert all(bytes(row.tolist()) in inside for row in tokens)


@pytest.mark.parametrize("n_bytes", [1, 2, 9, 10, 11, 25])
def test_short_texts_of_ones_own_are_read_to_the_last_byte(tmp_path, n_bytes):
    """Would catch an end that is cut off, and a validation part of a text too short to have one."""
    path = tmp_path / "own.txt"
    path.write_bytes(bytes(range(n_bytes)))
    assert text(path).tolist() == list(range(n_bytes))
    assert len(text(path, "validation")) == n_bytes // 10
    if n_bytes < 2:
        return
    seen = {
        byte for step in range(200) for byte in batch(0, step, 0, 1, 1, 1, path=path, split="all")[1].flatten().tolist()
    }
    assert seen == set(range(1, n_bytes))
    tokens, targets = batch(0, 0, 0, 1, 3, n_bytes - 1, path=str(path), split="all")
    assert tokens.tolist() == [list(range(n_bytes - 1))] * 3
    assert targets.tolist() == [list(range(1, n_bytes))] * 3


def test_an_edited_text_is_read_anew(tmp_path):
    """Would catch a text that is kept for good once it has been read."""
    path = tmp_path / "own.txt"
    path.write_text("before")
    os.utime(path, ns=(1, 1))
    assert decode(text(path)) == "before"
    path.unlink()
    path.write_text("after!")
    assert decode(text(path)) == "after!"


def test_writing_to_a_batch_changes_neither_the_text_nor_its_file():
    """Would catch tokens that are windows of the mapped file."""
    tokens, targets = batch(0, 0, 0, 1, 2, 8)
    expected, before = tokens.clone(), targets.clone()
    tokens.zero_()
    assert torch.equal(targets, before)
    assert torch.equal(batch(0, 0, 0, 1, 2, 8)[0], expected)


def test_the_text_that_ships_is_the_one_its_readme_describes():
    """Would catch a text that was edited, or replaced by one whose licence nobody noted."""
    readme = (data.SHIPPED.parent / "README.md").read_text()
    raw = data.SHIPPED.read_bytes()
    assert re.search(r"sha256\s+(\w+)", readme).group(1) == hashlib.sha256(raw).hexdigest()
    assert f"{len(raw):,}".replace(",", " ") in readme
    assert 200_000 < len(raw) < 1_000_000
    assert "public domain" in readme
    assert max(raw) < 128
    assert b"It is a truth universally acknowledged" in raw
    assert torch.equal(text(), torch.tensor(list(raw), dtype=torch.uint8))


@settings(max_examples=50)
@given(st.text())
def test_decode_undoes_encode_for_any_language(words):
    """Would catch characters taken for bytes."""
    tokens = encode(words)
    assert decode(tokens) == words
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == list(words.encode())


def test_decode_shows_half_a_letter_instead_of_failing():
    """Would catch a sample of an untrained model that cannot be printed."""
    assert decode(encode("né")[:2]) == "n\ufffd"
    assert decode(torch.tensor([255, 65])) == "\ufffdA"
    assert decode(torch.tensor(65)) == "A"
    assert decode(torch.empty(0, dtype=torch.int64)) == ""


@cases(
    ("call", "words"),
    [
        (lambda: batch(0, 0, 0, 3, 8, 4), ["8 rows", "3 ranks", "6 or 9"]),
        (lambda: batch(0, 0, 0, 4, 3, 4), ["3 rows", "4 ranks", "; 4 would"]),
        (lambda: batch(0, 0, 2, 2, 8, 4), ["dp_rank=2", "0 to 1"]),
        (lambda: batch(0, 0, -1, 2, 8, 4), ["dp_rank=-1"]),
        (lambda: batch(0, 0, 0, 1, 0, 4), ["batch_size=0"]),
        (lambda: batch(0, 0, 0, 1, 1, 0), ["seq=0"]),
        (lambda: batch(0, 0, 0, 1, 1, 10**6), ["seq=1000000", "1000001 bytes", "616292"]),
        (lambda: batch(0, 0, 0, 1, 1, 4, split="test"), ["train, validation", "'test'"]),
        (lambda: text("/nowhere/at/all.txt"), ["/nowhere/at/all.txt", "not a file"]),
        (lambda: decode(torch.tensor([3, 256])), ["256 is no byte"]),
        (lambda: decode(torch.tensor([-1])), ["-1 is no byte"]),
        (lambda: decode(torch.zeros(2, 3)), ["(2, 3)", "tokens[0]"]),
    ],
)
def test_what_cannot_be_cut_or_read_is_refused_with_its_numbers(call, words):
    """Would catch ranks with different numbers of rows, and an error from deep inside torch."""
    with pytest.raises(ValueError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), caught.value


def test_an_empty_text_is_refused(tmp_path):
    """Would catch a map of no bytes, which the operating system refuses in words of its own."""
    path = tmp_path / "empty.txt"
    path.touch()
    with pytest.raises(ValueError, match="empty"):
        text(path)
