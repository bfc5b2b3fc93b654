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
from labkit.view.panels import Column, Panel, below, beside, legend, over, page, phrase, space, table, tile
from labkit.view.svg import PALETTE, WIDTH, Picture, arrow, line
from labkit.view.units import bytes_text, metric_text, plural

KINDS = ("column", "row", "column, then row", "attention")
DIRECTIONS = ("forward", "backward")
WHOLE, COLUMNS, ROWS, TERM = "whole", "columns", "rows", "term"
LIT, PLAIN = PALETTE[0], PALETTE[4]
NAMES, SLOT, SIGN, DOOR, WAY = 78.0, 90.0, 10.0, 66.0, 336.0
"""The widths of the names at the left, of a matrix's slot, of a sign between two, of f or g, a "door", and of what is
sent in one direction."""
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
    weights = layer.n_weights * layer.item_bytes
    held = f"weights: {metric_text(weights, 'B')} whole, {metric_text(weights / n, 'B')} on each rank"
    held += "; gradients and optimizer states likewise, with no message of their own"
    shapes = "; ".join(f"{m.name} {list(m.local(n))} of {[m.rows, m.columns]}" for m in layer.matrices)
    measured = "; ".join(f"{way} on ranks {ledger.sent_bytes():,} B" for way, ledger in ledgers.items())
    laws = "; ".join(f"{way} by law {layer.sent_bytes(way):,} B" for way in DIRECTIONS)
    return page(
        title, _legend(layer, rank), _matrices(layer, rank, direction), _bytes(layer, direction, ledgers),
        phrase(held, 12), label=f"{title}; {shapes}; {laws}" + (f"; {measured}" if measured else ""),
    )  # fmt: skip


def _legend(layer: SplitLayer, rank: int) -> Panel:
    """The legend of the colours, and S."""
    keys = {f"here, on rank {rank}": LIT, "here whole, as on every rank": PLAIN, "on another rank": "none"}
    law = f"S = B T D × {layer.item_bytes} B = {bytes_text(layer.message_bytes)}"
    return over(legend(keys), phrase(law, 12, anchor="end", width=WIDTH - 8))


def _matrices(layer: SplitLayer, rank: int, direction: str) -> Panel:
    """The matrices from x to y with their names above and their shapes below, whole and on one rank; and between them
    the doors, or signs of what is done with them."""
    columns = [Column(width=NAMES)]
    names, drawn = list[str | Panel]([""]), list[str | Panel]([""])
    whole, local = (list[str | Panel]([phrase(words, 12, True)]) for words in ("whole", f"on rank {rank}"))
    doors, back = iter(layer.doors), direction == "backward"
    for matrix, after in zip(layer.matrices, (*layer.matrices[1:], None), strict=True):
        name = "d" * back + ("y" if back and matrix.cut == TERM else matrix.name)
        rows, across = matrix.local(layer.n_ranks)
        if (matrix.name == "x" and layer.kind != "row") or matrix.cut == TERM:
            between = _door(layer, next(doors), direction)
        elif after and not back:
            between = phrase("·" if "W" in after.name else "→" if after.cut == COLUMNS else "=")
        else:
            between = space(SIGN, 0)
        columns += [Column(anchor="middle", width=SLOT), Column(anchor="middle", width=max(SIGN, between.width))]
        names += [phrase(name, 12, True, "middle"), ""]
        drawn += [_matrix(matrix, layer, rank, direction), between]
        whole += [phrase(f"[{matrix.rows}, {matrix.columns}]", 11, anchor="middle"), ""]
        local += [phrase(f"[{rows}, {across}]", 11, True, "middle"), ""]
    return table(columns, (names, drawn, whole, local), gap=0)


def _matrix(matrix: Matrix, layer: SplitLayer, rank: int, direction: str) -> Panel:
    """One matrix, with its cuts, and the part of the rank coloured."""
    n, largest = layer.n_ranks, max(max(other.rows, other.columns) for other in layer.matrices)
    high = TALL * max(0.34, min(1.0, matrix.rows / largest) ** 0.4)
    wide = WIDE * max(0.34, min(1.0, matrix.columns / largest) ** 0.4)
    back = direction == "backward"
    term = "whole on every rank" if back else "one term of a sum, as large as the whole"
    extent = {TERM: term, WHOLE: "whole on every rank"}.get(matrix.cut)
    part = f"{matrix.cut} {rank} of {n}, {list(matrix.local(n))}"
    hover = f"{matrix.name} {[matrix.rows, matrix.columns]}: {extent or part}"
    if matrix.cut not in (ROWS, COLUMNS):
        return tile(wide, high, LIT if matrix.cut == TERM and not back else PLAIN, "", hover)
    across = matrix.cut == COLUMNS
    lit = tile(wide / n, high, LIT, "", hover) if across else tile(wide, high / n, LIT, "", hover)
    # the cuts are the edges between n parts, of which only these lines are drawn
    cuts = [k / n for k in range(1, n if n <= MOST_LINES else 0)]

    def edges(x: float, y: float) -> str:
        if across:
            return "".join(line(x + k * wide, y, x + k * wide, y + high, "2 3") for k in cuts)
        return "".join(line(x, y + k * high, x + wide, y + k * high, "2 3") for k in cuts)

    chosen = lit.padded(left=rank * wide / n) if across else lit.padded(top=rank * high / n)
    return over(tile(wide, high, "none", "", hover), chosen, Panel(wide, high, edges))


def _door(layer: SplitLayer, name: str, direction: str) -> Panel:
    """f or g between two slots, with an arrow in the direction of the pass; it is filled if it sends anything."""
    verb = layer.verb(name, direction)
    hover = f"{name}, {direction}: "
    hover += f"{verb}, {layer.sent_bytes(direction, name):,} B from each rank" if verb else "nothing is sent"
    does = verb.replace("_", "-").split("-") if verb else ["sends", "nothing"]

    def passes(x: float, y: float) -> str:
        ends = [(x + 2, y + 12), (x + DOOR - 2, y + 12)]
        return arrow(ends if direction == "forward" else ends[::-1], hover)

    box_ = tile(28, 44, PALETTE[1] if verb else "none", name, hover, 2.5 if verb else 1).padded(left=DOOR / 2 - 14)
    return below(*(phrase(word, 11, anchor="middle", width=DOOR) for word in does), box_, Panel(DOOR, 31, passes))


def _bytes(layer: SplitLayer, direction: str, ledgers: Mapping[str, Ledger]) -> Panel:
    """f and g, forward and backward, with the chosen direction framed; measured bytes below the law's."""
    columns = [below(space(NAMES, 24), *(phrase(door, bold=True) for door in layer.doors))]
    for way in DIRECTIONS:
        rows = [phrase(way + " (shown above)" * (way == direction), bold=True)]
        for door in layer.doors:
            verb = layer.verb(door, way)
            name = {"f": "dx" if way == "backward" else "x", "g": "dy" if way == "backward" else "y"}[door[0]]
            law = "2(n-1)/n S" if verb == "all_reduce" else "(n-1)/n S"
            words = f"{verb.replace('_', '-')} of {name}: {law} = {bytes_text(layer.sent_bytes(way, door))}"
            rows.append(phrase(words if verb else f"{name} goes on as it is: 0 B", 12))
        rows.append(phrase(f"together {layer.sent_bytes(way):,} B from each rank", 12))
        if way in ledgers:
            seen, law_bytes = ledgers[way].sent_bytes(), layer.sent_bytes(way)
            same = "as the law" if seen == law_bytes else f"the law says {law_bytes:,} B"
            how = "charged" if ledgers[way].charged_bytes() else "counted"
            rows.append(phrase(f"{how} on ranks: {seen:,} B, {same}", 12, bold=True, width=WAY - 16))
        inside = below(*rows, gap=1).padded(8, 4, 8, 6)
        frame = tile(WAY, inside.height, "none", "", f"chosen: {direction}", 2.5)
        columns.append(over(frame if way == direction else space(WAY, 0), inside))
    return beside(*columns, gap=6, top=True)
