"""A layer cut over n ranks: its matrices with their shapes, the part of each that one rank holds, and f and g.

          f                                                   g
    x  -->|--> [ W1^T  ] = [ h    ]  act  [ W2^T ] = [ y ] -->|--> y        blue: parts of the chosen rank
    whole      columns      columns       rows       a term         whole

              forward                        backward
    f         x passes unchanged             all-reduce of dx: 2(n-1)/n S
    g         all-reduce of y: 2(n-1)/n S    dy passes unchanged          S = bytes of x (and of y)

Backward runs from right to left through the same boxes, with gradients of the same shapes. With sequence parallelism
x and y are cut by position, f' gathers them and g' scatters the sum: (n-1)/n S each, in both directions.

Sources: Shoeybi et al., arXiv:1909.08053, section 3; Korthikanti et al., arXiv:2205.05198, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from labkit.comm.ledger import Ledger
from labkit.parallel.tensor import divided
from labkit.view.svg import PALETTE, Picture, arrow, box, headline, line, text
from labkit.view.units import bytes_text, metric_text, plural

KINDS = ("column", "row", "column, then row", "attention")
DIRECTIONS = ("forward", "backward")
WHOLE, COLUMNS, ROWS, TERM = "whole", "columns", "rows", "term"
LIT, PLAIN = PALETTE[0], PALETTE[4]
LEFT, SLOT, DOOR, MIDDLE = 78.0, 98.0, 66.0, 152.0
"""The left end of the first slot, the width of a matrix's slot and of that of f or g, a "door", and the height of the
matrices' middle."""
TALL, WIDE = 96.0, 84.0
"""The height and the width of the largest matrix."""
MOST_LINES = 16
"""The most ranks for which all cuts are drawn; more lines would run together."""
Heard = Mapping[str, Mapping[str, Ledger]]


@dataclass(frozen=True)
class Matrix:
    """A matrix of the picture: its name, its shape on one device, and how it is cut: whole, columns, rows or term."""

    name: str
    rows: int
    columns: int
    cut: str

    def local(self, n: int) -> tuple[int, int]:
        """The shape of the part that one of n ranks has; a term of a sum has the shape of the whole."""
        return self.rows // n if self.cut == ROWS else self.rows, self.columns // (n if self.cut == COLUMNS else 1)


@dataclass(frozen=True)
class SplitLayer:
    """The sizes of a layer that is cut over `n_ranks`.

    kind         "column", "row", "column, then row" (an MLP) or "attention"
    width, ff    D, the width of x and y, and F, that of the hidden layer (attention: D again, in `n_head` heads)
    batch, seq   B rows of T positions
    item_bytes   bytes of one number
    sequence     True if x and y are cut by position

    ValueError for sizes below 1, and for sizes without n equal parts; it names numbers of ranks that would do."""

    kind: str = "column, then row"
    n_ranks: int = 4
    width: int = 1024
    ff: int = 4096
    n_head: int = 16
    batch: int = 4
    seq: int = 512
    item_bytes: int = 4
    sequence: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"a layer is one of {', '.join(map(repr, KINDS))}, got {self.kind!r}")
        for name in ("n_ranks", "width", "ff", "n_head", "batch", "seq", "item_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 10**6:
                raise ValueError(f"{name} is a whole number from 1 to a million, got {value!r}")
        if self.kind == "attention":
            divided(self.n_head, self.n_ranks, "the number of heads")
            divided(self.width, self.n_head, "D, to be cut into heads,")
        else:
            divided(self.ff, self.n_ranks, "F")
        if self.sequence:
            divided(self.seq, self.n_ranks, "the length of the sequence T")

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """The matrices from x to y, in the order of the picture."""
        tokens, d, f = self.batch * self.seq, self.width, self.ff
        ends = ROWS if self.sequence else WHOLE
        enters = (Matrix("x", tokens, d, ends),)
        leaves = (Matrix("term of y", tokens, d, TERM), Matrix("y", tokens, d, ends))
        if self.kind == "column":
            return (*enters, Matrix("Wᵀ", d, f, COLUMNS), Matrix("y", tokens, f, COLUMNS))
        if self.kind == "row":
            return (Matrix("x", tokens, f, COLUMNS), Matrix("Wᵀ", f, d, ROWS), *leaves)
        if self.kind == "attention":
            middle = Matrix("Wqᵀ Wkᵀ Wvᵀ", d, d, COLUMNS), Matrix("heads", tokens, d, COLUMNS)
            return (*enters, *middle, Matrix("Woᵀ", d, d, ROWS), *leaves)
        middle = Matrix("W1ᵀ", d, f, COLUMNS), Matrix("act(h)", tokens, f, COLUMNS)
        return (*enters, *middle, Matrix("W2ᵀ", f, d, ROWS), *leaves)

    @property
    def doors(self) -> tuple[str, ...]:
        """The names of the ends that the layer has, "f" and "g"; with sequence parallelism "f′" and "g′"."""
        prime = "′" * self.sequence
        return tuple(door + prime for door, kind in (("f", "row"), ("g", "column")) if self.kind != kind)

    @property
    def message_bytes(self) -> int:
        """S, the bytes of the whole x, or of the whole y."""
        return self.batch * self.seq * self.width * self.item_bytes

    @property
    def n_weights(self) -> int:
        """Numbers in the layer's matrices, on all ranks together."""
        if self.kind == "attention":
            return 4 * self.width**2
        return (1 + (self.kind == "column, then row")) * self.width * self.ff

    def verb(self, door: str, direction: str) -> str:
        """The collective of a door in a direction: "all_reduce", "all_gather", "reduce_scatter", or "" for none."""
        gives = (door[0] == "g") == (direction == "forward")
        if self.n_ranks == 1:
            return ""
        return ("reduce_scatter" if gives else "all_gather") if self.sequence else "all_reduce" if gives else ""

    def sent_bytes(self, direction: str, door: str | None = None) -> int:
        """Bytes that a rank sends in a direction, through one door or through all of them."""
        verbs = [self.verb(name, direction) for name in self.doors if door in (None, name)]
        parts = sum({"all_reduce": 2, "": 0}.get(verb, 1) for verb in verbs)
        return parts * (self.n_ranks - 1) * self.message_bytes // self.n_ranks


def split_layer(layer: SplitLayer, rank: int = 0, direction: str = "forward", heard: Heard | None = None) -> Picture:
    """The matrices of `layer` with the part of `rank` coloured, f and g in their places, and the bytes that each sends.

    `heard` maps kind and direction to the ledger of a rank that ran the layer, whose bytes stand beside the law's.
    ValueError for a rank that the layer does not have, and for another direction."""
    if not 0 <= rank < layer.n_ranks:
        raise ValueError(f"there are ranks 0 to {layer.n_ranks - 1}, got {rank}")
    if direction not in DIRECTIONS:
        raise ValueError(f"a direction is forward or backward, got {direction!r}")
    n, ledgers = layer.n_ranks, (heard or {}).get(layer.kind, {})
    sent = layer.sent_bytes(direction)
    ways = f"{layer.kind} on {plural(n, 'rank')}" + ", cut by position outside" * layer.sequence
    title = f"{ways}, {direction}: rank {rank} sends {bytes_text(sent)}"
    body = [headline(title), *_legend(layer, rank)]
    x, doors = LEFT, iter(layer.doors)
    for matrix, after in zip(layer.matrices, (*layer.matrices[1:], None), strict=True):
        body += _matrix(matrix, layer, rank, direction, x)
        x += SLOT
        if (matrix.name == "x" and layer.kind != "row") or matrix.cut == TERM:
            body += _door(layer, next(doors), direction, x)
            x += DOOR
        elif after and direction == "forward":
            body.append(
                text(x, MIDDLE + 4, "·" if "W" in after.name else "→" if after.cut == COLUMNS else "=", "middle")
            )
    body += [text(4, 238, "whole", size=12, bold=True), text(4, 256, f"on rank {rank}", size=12, bold=True)]
    body += _table(layer, direction, ledgers)
    weights = layer.n_weights * layer.item_bytes
    held = f"weights: {metric_text(weights, 'B')} whole, {metric_text(weights / n, 'B')} on each rank"
    body.append(text(4, 392, f"{held}; gradients and optimizer states likewise, with no message of their own", size=12))
    shapes = "; ".join(f"{m.name} {list(m.local(n))} of {[m.rows, m.columns]}" for m in layer.matrices)
    measured = "; ".join(f"{way} on ranks {ledger.sent_bytes():,} B" for way, ledger in ledgers.items())
    laws = "; ".join(f"{way} by law {layer.sent_bytes(way):,} B" for way in DIRECTIONS)
    return Picture("".join(body), 402, f"{title}; {shapes}; {laws}" + (f"; {measured}" if measured else ""))


def _legend(layer: SplitLayer, rank: int) -> list[str]:
    """The legend of the colours."""
    rows = ((LIT, f"here, on rank {rank}"), (PLAIN, "here whole, as on every rank"), ("none", "on another rank"))
    out, x = [], 4.0
    for fill, words in rows:
        out += [box(x, 34, 14, 14, fill), text(x + 20, 45, words, size=12)]
        x += 46 + 6.6 * len(words)
    return [*out, text(796, 45, f"S = B T D × {layer.item_bytes} B = {bytes_text(layer.message_bytes)}", "end", 12)]


def _matrix(matrix: Matrix, layer: SplitLayer, rank: int, direction: str, x: float) -> list[str]:
    """One matrix in its slot: the cuts, the coloured part of the rank, and both shapes below."""
    n, largest = layer.n_ranks, max(max(other.rows, other.columns) for other in layer.matrices)
    high = TALL * max(0.34, min(1.0, matrix.rows / largest) ** 0.4)
    wide = WIDE * max(0.34, min(1.0, matrix.columns / largest) ** 0.4)
    left, top = x + (SLOT - wide) / 2, MIDDLE - high / 2
    back = direction == "backward"
    name = "d" * back + ("y" if back and matrix.cut == TERM else matrix.name)
    shape = list(matrix.local(n))
    term = "whole on every rank" if back else "one term of a sum, as large as the whole"
    extent = {TERM: term, WHOLE: "whole on every rank"}.get(matrix.cut)
    hover = f"{matrix.name} {[matrix.rows, matrix.columns]}: {extent or f'{matrix.cut} {rank} of {n}, {shape}'}"
    out = []
    if matrix.cut in (ROWS, COLUMNS):
        across = matrix.cut == COLUMNS
        out.append(box(left, top, wide, high, "none", "", hover))
        step = (wide if across else high) / n
        part = (left + rank * step, top, step, high) if across else (left, top + rank * step, wide, step)
        out.append(box(*part, LIT, "", hover))
        for k in range(1, n if n <= MOST_LINES else 0):
            at = (left if across else top) + k * step
            ends = (at, top, at, top + high) if across else (left, at, left + wide, at)
            out.append(line(*ends, "2 3"))
    else:
        fill = LIT if matrix.cut == TERM and not back else PLAIN
        out.append(box(left, top, wide, high, fill, "", hover))
    middle = x + SLOT / 2
    out.append(text(middle, 92, name, "middle", 12, True))
    out.append(text(middle, 238, f"[{matrix.rows}, {matrix.columns}]", "middle", 11))
    return [*out, text(middle, 256, f"[{shape[0]}, {shape[1]}]", "middle", 11, True)]


def _door(layer: SplitLayer, name: str, direction: str, x: float) -> list[str]:
    """f or g between two slots, with an arrow in the direction of the pass; it is filled if it sends anything."""
    verb = layer.verb(name, direction)
    ends = [(x + 2, MIDDLE + 34), (x + DOOR - 2, MIDDLE + 34)]
    sent = layer.sent_bytes(direction, name)
    hover = f"{name}, {direction}: " + (f"{verb}, {sent:,} B from each rank" if verb else "nothing is sent")
    out = [box(x + 19, MIDDLE - 22, 28, 44, PALETTE[1] if verb else "none", name, hover, 2.5 if verb else 1)]
    out.append(arrow(ends if direction == "forward" else ends[::-1], hover))
    words = verb.replace("_", "-").split("-") if verb else ["sends", "nothing"]
    out += [text(x + DOOR / 2, MIDDLE - 46 + 14 * k, word, "middle", 11) for k, word in enumerate(words)]
    return out


def _table(layer: SplitLayer, direction: str, ledgers: Mapping[str, Ledger]) -> list[str]:
    """f and g, forward and backward, with the chosen direction framed; measured bytes below the law's."""
    places = {"forward": 118.0, "backward": 460.0}
    out = [box(places[direction] - 8, 272, 336, 96, "none", "", f"chosen: {direction}", 2.5)]
    for way, x in places.items():
        out.append(text(x, 288, way + " (shown above)" * (way == direction), bold=True))
        for k, door in enumerate(layer.doors):
            verb, y = layer.verb(door, way), 306 + 18 * k
            name = {"f": "dx" if way == "backward" else "x", "g": "dy" if way == "backward" else "y"}[door[0]]
            law = "2(n-1)/n S" if verb == "all_reduce" else "(n-1)/n S"
            words = f"{verb.replace('_', '-')} of {name}: {law} = {bytes_text(layer.sent_bytes(way, door))}"
            out.append(text(x, y, words if verb else f"{name} goes on as it is: 0 B", size=12))
        out.append(text(x, 342, f"together {layer.sent_bytes(way):,} B from each rank", size=12))
        if way in ledgers:
            seen, law_bytes = ledgers[way].sent_bytes(), layer.sent_bytes(way)
            same = "as the law" if seen == law_bytes else f"the law says {law_bytes:,} B"
            how = "charged" if ledgers[way].charged_bytes() else "counted"
            out.append(text(x, 360, f"{how} on ranks: {seen:,} B, {same}", size=12, bold=True))
    return out + [text(4, 306 + 18 * k, door, bold=True) for k, door in enumerate(layer.doors)]
