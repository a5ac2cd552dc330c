"""What the tuner of alpha is told, from the event loop to its own thread."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

# for checking only: it brings in SciPy's statistics, a second that a gateway without a tuner need not wait for
if TYPE_CHECKING:
    from hexrepro.tuning.online import OnlineTuner


class TunerLog:
    """The events for an `OnlineTuner`, kept until its thread asks for them. The tuner belongs to whoever calls `catch_up`."""

    def __init__(self, tuner: OnlineTuner) -> None:
        self.tuner = tuner
        self._events: deque[tuple[str, tuple, dict]] = deque()  # its ends may be used by different threads

    def tell(self, event: str, *args, **values) -> None:
        """Something has happened: `set_cluster`, or an event of the tuner's history, with its arguments."""
        self._events.append((event, args, values))

    def catch_up(self, now_s: float) -> float:
        """Pass on what has happened, let the tuner decide if it is time to, and return the alpha that it wants."""
        while self._events:
            event, args, values = self._events.popleft()
            getattr(self.tuner if event == "set_cluster" else self.tuner.history, event)(*args, **values)
        self.tuner.step(now_s)
        return self.tuner.alpha
