"""The kernels of `labkit lab`: one that is started for a notebook with labkit in it fetches torch for ranks at once.

Its first cluster then waits for less, or for nothing: torch is imported while the notebook opens and its first lines
are read. A kernel of any other notebook is started as by any server, and so is one that is no IPython kernel.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from jupyter_server.services.kernels.kernelmanager import AsyncMappingKernelManager

EARLY = "--ext=labkit.launch.early"
_USES = re.compile(r"^\s*(%load_ext|import|from)\s+labkit\b", re.MULTILINE)


class LabKernels(AsyncMappingKernelManager):
    """The server's kernels, started with one argument more where the notebook uses labkit."""

    async def start_kernel(self, **kwargs: Any) -> str:  # type: ignore[override]
        """Start a kernel; its environment names the notebook."""
        notebook = (kwargs.get("env") or {}).get("JPY_SESSION_NAME", "")
        specs: Any = self.kernel_spec_manager
        spec = specs.get_kernel_spec(kwargs.get("kernel_name") or self.default_kernel_name)
        if "ipykernel_launcher" in spec.argv and uses_labkit(Path(notebook)):
            kwargs["extra_arguments"] = [*kwargs.get("extra_arguments", ()), EARLY]
        return str(await super().start_kernel(**kwargs))


def uses_labkit(notebook: Path) -> bool:
    """True if a cell of this notebook loads labkit; False if there is no such notebook."""
    try:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        return any(cell["cell_type"] == "code" and _USES.search("".join(cell["source"])) for cell in cells)
    except (OSError, ValueError, KeyError, TypeError):  # no notebook of today's format: its kernel starts as always
        return False
