"""Ring, gather or Ulysses? Row, heads, ranks and link, and what each of the three sends, waits for and holds."""

from __future__ import annotations

import ipywidgets as widgets

from labkit.course.topics.context_picture import LENGTHS, LINKS, three_ways, tokens_text
from labkit.course.topics.zigzag_picture import MOST, orders
from labkit.course.widgets.explorer import Explorer, in_two_columns
from labkit.parallel.context import contiguous, zigzag
from labkit.plan.machine.link import link_of
from labkit.plan.model.cut_attention import CutAttention
from labkit.view.svg import Drawing
from labkit.view.units import parsed

RANKS = (2, 4, 8, 16, 32, 64)
HEADS = (8, 16, 32, 64, 128)
KEY_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
VIEWS = ("three ways", "work of each rank")


class ContextExplorer(Explorer):
    """Sliders for tokens of a sequence, query heads, key heads and ranks, a list of links, and flop/s in a field.

    Arrow keys move a slider. "work of each rank" shows the same ranks in order and in zigzag order, up to eight of
    them. What cannot be (more key heads than query heads) keeps the last picture and says the reason."""

    recorded_over = ("seq",)

    def __init__(
        self, seq: int = 2**17, heads: int = 64, key_heads: int = 8, n: int = 8, link: str = "nvlink",
        flops_per_s: float = 400e12, width: int = 128, view: str = VIEWS[0],
    ) -> None:  # fmt: skip
        """It starts with a layer of Llama 3 70B and 128k tokens. ValueError for what the sliders do not have."""
        for name, value, known in (("seq", seq, LENGTHS), ("heads", heads, HEADS), ("key_heads", key_heads, KEY_HEADS),
                                   ("n", n, RANKS), ("link", link, LINKS), ("view", view, VIEWS)):  # fmt: skip
            if value not in known:
                raise ValueError(f"{name} is one of {', '.join(map(str, known))}, got {value!r}")
        self.width = width
        self.seq = widgets.SelectionSlider(
            options=[(tokens_text(length), length) for length in LENGTHS], value=seq, description="tokens"
        )
        self.ranks = widgets.SelectionSlider(options=RANKS, value=n, description="ranks, cp")
        self.heads = widgets.SelectionSlider(options=HEADS, value=heads, description="heads")
        self.key_heads = widgets.SelectionSlider(options=KEY_HEADS, value=key_heads, description="key heads")
        self.link = widgets.Dropdown(options=LINKS, value=link, description="link")
        rate = f"{flops_per_s / 1e12:g}e12"
        self.rate = widgets.Text(rate, description="flop/s", continuous_update=False)
        self.view = widgets.ToggleButtons(options=VIEWS, value=view)
        controls = [self.seq, self.ranks, self.heads, self.key_heads, self.link, self.rate]
        super().__init__([in_two_columns(controls), self.view], [*controls, self.view])

    def layer(self) -> CutAttention:
        """The attention of the present controls, bf16, one sequence. ValueError for heads that cannot share."""
        heads, key_heads = self.heads.value, self.key_heads.value
        if heads % key_heads:
            raise ValueError(f"{heads} query heads cannot share {key_heads} key heads evenly: take fewer key heads")
        return CutAttention(self.seq.value, self.ranks.value, heads, key_heads, self.width)

    def drawn(self) -> Drawing:
        """The picture for the present controls. ValueError for heads or flop/s that make no sense."""
        layer, rate = self.layer(), parsed(self.rate.value, "flop/s")
        if not rate:
            raise ValueError("a rank that computes nothing waits for nothing: say flop/s above 0, such as 400e12")
        if self.view.value == VIEWS[0]:
            return three_ways(layer, link_of(self.link.value), rate)
        if layer.n > MOST:
            raise ValueError(f"{layer.n} ranks are too many to draw who computes what: take {MOST} or fewer")
        length = 64 * layer.n  # enough that the squares on the diagonal are about half full
        return orders({"in order": contiguous(length, layer.n), "zigzag": zigzag(length, layer.n)})
