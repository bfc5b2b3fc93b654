"""An extension of IPython for kernels that will need ranks: it begins to import torch for them, and returns at once.

The import happens in a process of its own, the zygote, so that the first cell does not wait for it. `%load_ext labkit`
is still to come: it finds what was begun here.
"""

from __future__ import annotations

from typing import Any

from labkit.launch.zygote import zygote


def load_ipython_extension(shell: Any) -> None:
    """Called by IPython when the kernel starts."""
    zygote()
