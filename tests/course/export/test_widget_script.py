"""A widget's module as a script of a page."""

from __future__ import annotations

from pathlib import Path

import pytest

from labkit.course.export.widget_script import page_script
from labkit.course.widgets import film_player

MODULE = Path(film_player.__file__).with_name("film_player.js")


def test_the_script_is_the_module_with_its_export_as_a_constant():
    """Would catch a page whose film is another than JupyterLab's."""
    script = page_script(MODULE, "filmPlayer")
    assert "\nconst filmPlayer = (() => {\n" in script
    assert "return { render };\n})();" in script
    assert MODULE.read_text().partition("export default")[0] in script
    assert "export default" not in script


@pytest.mark.parametrize(
    "module",
    ["const a = 1;\n", "import b from 'b';\nexport default { b };\n", "export const a = 1;\nexport default { a };\n"],
)
def test_a_module_that_is_no_script_is_refused(module, tmp_path):
    """Would catch a page with a syntax error, which plays nothing."""
    (tmp_path / "module.js").write_text(module)
    with pytest.raises(ValueError, match=r"module\.js is no script for a page"):
        page_script(tmp_path / "module.js", "name")
