"""An extension of IPython for kernels of notebooks with labkit: it begins to import torch, and returns at once.

Twice, since two processes need it: for the ranks in the zygote, and for the notebook's own cells in a thread beside
them. The first `import torch` of a cell finds the import done, or waits for the rest of it; the first cluster does the
same. `%load_ext labkit` is still to come: it finds what was begun here.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from typing import Any

from labkit.launch.zygote import zygote


def load_ipython_extension(shell: Any) -> None:
    """Called by IPython when the kernel starts."""
    zygote()
    threading.Thread(target=_fetch, name="labkit-early", daemon=True).start()


def _fetch() -> None:
    with contextlib.suppress(Exception):  # the cell that imports it will say what is wrong with it
        importlib.import_module("torch")
