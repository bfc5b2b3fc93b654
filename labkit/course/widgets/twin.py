"""A static twin: the picture of a widget for places where no widgets run, such as an HTML export or a code host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from IPython.display import publish_display_data

from labkit.view.svg import Drawing

VIEW = "application/vnd.jupyter.widget-view+json"
LIVE = ".widget-box,.lk-film"
"""Elements that only a running widget puts into the page; an export wraps dead ones in `jupyter-widgets`, too."""
DEAD = f".jp-OutputArea-child:has(>.jupyter-widgets):not(:has({LIVE}))"
"""What JupyterLab shows for a widget whose kernel is gone: that its model was not found."""
STYLE = (
    f"<style>.jp-OutputArea:has({LIVE}) .lk-twin,.output:has({LIVE}) .lk-twin,"
    f".jp-OutputArea:has(.lk-twin) {DEAD}{{display:none}}</style>"
)


class Twin:
    """Below its live view a widget publishes `static()`; the page hides that picture while the widget runs.

    A single output with both would not work: if a notebook keeps the state of its widgets, nbconvert takes the live
    view from it, which needs the network. Nor may the live view contain a picture: without state both would be shown.
    Name it before the widget's class: `class Film(Twin, AnyWidget)`."""

    static: Callable[[], Drawing]

    def kept(self) -> dict[str, Any]:
        """What a page without a kernel needs to do this widget's work, stored with the output; {} if nothing."""
        return {}

    def _ipython_display_(self, **kwargs: Any) -> None:
        bundle = self._repr_mimebundle_(**kwargs)
        data = bundle[0] if isinstance(bundle, tuple) else bundle or {}
        asleep = getattr(self, "asleep", "")  # of a widget that is only its picture (live.py)
        if VIEW in data and not asleep:
            publish_display_data(data={VIEW: data[VIEW], "text/plain": ""})  # nbconvert warns if there is no text
        picture = self.static()
        page = f'{STYLE}<div class="lk-twin">{picture.html()}{asleep and f"<p>{asleep}</p>"}</div>'
        publish_display_data(data={"text/html": page, "text/plain": repr(picture)}, metadata=metadata_of(self.kept()))

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        if not hasattr(super(), "_repr_mimebundle_"):
            if not (model_id := getattr(self, "model_id", None)):
                return {"image/svg+xml": str(self.static())}  # no widget at all (live.py)
            view = {"version_major": 2, "version_minor": 0, "model_id": model_id}  # what ipywidgets 7 shows itself by
            return {VIEW: view, "image/svg+xml": str(self.static())}
        bundle = super()._repr_mimebundle_(**kwargs)  # type: ignore[misc]
        if isinstance(bundle, tuple):
            data, metadata = bundle
            return {**data, "image/svg+xml": str(self.static())}, metadata
        return None if bundle is None else {**bundle, "image/svg+xml": str(self.static())}


def metadata_of(kept: dict[str, Any]) -> dict[str, Any]:
    """An output's metadata which hold this, in labkit's own place."""
    return {"labkit": kept} if kept else {}
