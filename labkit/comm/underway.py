"""What torch.distributed has under way: its handle, and what remains to be done when it is through."""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor


class UnderWay:
    """torch's handle, the tensors it works on, and what remains to be done when it is through."""

    def __init__(
        self,
        work: Any,
        x: Tensor | None = None,
        back_to: Tensor | None = None,
        divide: int = 1,
        source: Tensor | None = None,
    ):
        self.work, self.x, self.back_to, self.divide, self.source = work, x, back_to, divide, source

    def wait(self) -> Tensor | None:
        """Block until torch is through, then finish the rest."""
        if self.work is not None:
            self.work.wait()
            self.work = self.source = None
            if self.divide > 1 and self.x is not None:
                self.x.div_(self.divide)
            if self.back_to is not None and self.x is not None:
                self.back_to.copy_(self.x)
        return self.x if self.back_to is None else self.back_to

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self.work is None or bool(self.work.is_completed())


class Message(UnderWay):
    """A message under gloo, which tells only those who wait: whoever asks `done` has a thread waiting for them."""

    asking: threading.Thread | None = None
    error: BaseException | None = None

    def wait(self) -> Tensor | None:
        """Block until the message is through."""
        if self.asking is not None:
            self.asking.join()
            self.asking = None
        if self.error is not None:
            raise self.error
        return super().wait()

    def done(self) -> bool:
        """Whether the message is through."""
        if self.work is None or self.work.is_completed():
            return True
        if self.asking is None:
            self.asking = threading.Thread(target=self._ask, daemon=True)
            self.asking.start()
        self.asking.join(1e-3)  # what is here already is seen by the first question
        return not self.asking.is_alive()

    def _ask(self) -> None:
        try:
            super().wait()
        except BaseException as error:
            self.error = error
