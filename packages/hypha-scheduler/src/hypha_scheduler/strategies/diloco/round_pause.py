"""Pause of a job: for want of workers or of a parameter server its open round waits. Pure; called by `rounds`."""

from __future__ import annotations

from dataclasses import dataclass

from hypha_scheduler.strategies.base import EmitEvent
from hypha_scheduler.strategies.diloco.events import continued_event, member_event
from hypha_scheduler.strategies.diloco.members import Roster
from hypha_scheduler.strategies.diloco.open_round import Round


@dataclass(slots=True)
class RoundPause:
    """Whether the open round waits, and why."""

    roster: Roster
    server_gone: str | None = None
    """Why there is no parameter server; None if there is one."""
    last_change: str = "workers are missing"
    """What happened last to a worker, which is the reason if there are too few now."""
    reason: str | None = None
    """Why the open round waits; None if it does not."""
    began_at: float = 0.0
    """Time at which it began to wait."""

    def why(self, number: int, current: Round | None) -> str | None:
        """Return why the open round has to wait; None if it need not. `current` is None before it has begun."""
        if self.server_gone is not None:
            return f"there is no parameter server: {self.server_gone}"
        if (current is not None and current.announced_at is not None) or not self.roster.lacks_workers(number, current):
            return None
        count, least = len(self.roster.present(number, current)), self.roster.least(current)
        return f"{self.last_change}; {count} of at least {least} remain"

    def set(self, why: str | None, now: float) -> EmitEvent | None:
        """Begin or end a pause; return the event that tells of it."""
        before, self.reason = self.reason, why
        if why is not None:
            self.began_at = now if before is None else self.began_at
            return None if why == before else member_event("paused", why)
        return None if before is None else continued_event(now - self.began_at, "what it waited for is there")
