"""A matrix, some ranks and two placements: the collective that a redistribution needs, and its bytes."""

from __future__ import annotations

import ipywidgets as widgets

from labkit.course.topics.placement_picture import placements
from labkit.course.widgets.explorer import Explorer, in_two_columns
from labkit.plan.typed import whole
from labkit.view.svg import Drawing

PLACEMENTS = ("S(0)", "S(1)", "R", "P(sum)")
RANKS = (1, 2, 3, 4, 6, 8, 16, 32, 64)
WORDS = (("fp32", 4), ("bf16", 2), ("fp64", 8))
MESHES = (("GPUs", False), ("CPUs", True))


class PlacementExplorer(Explorer):
    """Fields for rows and columns, a slider for ranks, and lists for both placements, the dtype and the kind of mesh.

    What torch refuses keeps the last picture and says the reason."""

    recorded_over = ("after",)

    def __init__(
        self, rows: int = 4096, columns: int = 1024, n: int = 4, before: str = "S(0)", after: str = "R", word: int = 4
    ) -> None:
        """It starts with a weight that `fully_shard` has cut, and a line that needs all of it. ValueError for what the
        controls do not have."""
        for name, value, known in (("n", n, RANKS), ("before", before, PLACEMENTS), ("after", after, PLACEMENTS),
                                   ("word", word, [size for _, size in WORDS])):  # fmt: skip
            if value not in known:
                raise ValueError(f"{name} is one of {', '.join(map(str, known))}, got {value!r}")
        self.rows = widgets.Text(str(rows), description="rows", continuous_update=False)
        self.columns = widgets.Text(str(columns), description="columns", continuous_update=False)
        self.ranks = widgets.SelectionSlider(options=RANKS, value=n, description="ranks")
        self.word = widgets.Dropdown(options=WORDS, value=word, description="dtype")
        self.before = widgets.Dropdown(options=PLACEMENTS, value=before, description="from")
        self.after = widgets.Dropdown(options=PLACEMENTS, value=after, description="to")
        self.mesh = widgets.ToggleButtons(options=MESHES, value=False)
        controls = [self.rows, self.columns, self.before, self.after, self.ranks, self.word]
        super().__init__([in_two_columns(controls), self.mesh], [*controls, self.mesh])

    def drawn(self) -> Drawing:
        """The picture for the present controls. ValueError for a size that is none, and for what torch refuses."""
        shape = whole(self.rows.value, "rows"), whole(self.columns.value, "columns")
        places = self.before.value, self.after.value
        return placements(shape, self.ranks.value, *places, self.word.value, self.mesh.value)
