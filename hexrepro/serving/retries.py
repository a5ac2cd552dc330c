"""How many attempts may follow failed ones.

Without a bound, servers that fail or time out because they are overloaded would get up to `attempts` times the load, just then.
So further attempts are paid for: every call adds a share of one, as in Finagle and Envoy. There is a reserve for the moment in
which an instance dies and all its calls go elsewhere at once.
"""

from __future__ import annotations


class RetryBudget:
    """`share`: attempts that a call adds. `reserve`: attempts in hand at the start, and at most."""

    def __init__(self, share: float, reserve: float) -> None:
        self._share, self._most = share, reserve
        self.left = reserve

    def add(self) -> None:
        """A call has come."""
        self.left = min(self._most, self.left + self._share)

    def take(self) -> bool:
        """Whether one more attempt may be made; it is then paid for."""
        if self.left < 1.0:
            return False
        self.left -= 1.0
        return True
