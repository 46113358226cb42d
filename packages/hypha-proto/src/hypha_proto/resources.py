"""Resources of a machine or requirements of a job: a vector of four amounts with a partial order."""

from __future__ import annotations

from typing import Final

from hypha_proto.wire_schema import Amount, Message

RESOURCE_UNITS: Final = {"gpu": "GB", "cpu": "cores", "memory": "GB", "storage": "GB"}
"""Units of the amounts, by name."""
GIGABYTE: Final = 10**9
"""Bytes."""
_SLACK = 1e-9  # tolerance for rounding: releasing 0.1 + 0.2 must make 0.3 available again


class Resources(Message, frozen=True):
    """Amounts of resources, all finite and not negative."""

    gpu: Amount = 0.0
    """GPU memory, GB."""
    cpu: Amount = 0.0
    """Cores."""
    storage: Amount = 0.0
    """Disk, GB."""
    memory: Amount = 0.0
    """RAM, GB."""

    def covers(self, other: Resources) -> bool:
        """Return whether every amount is at least that of `other`."""
        return all(getattr(self, name) + _SLACK >= getattr(other, name) for name in RESOURCE_UNITS)

    def lacking(self, other: Resources) -> tuple[str, ...]:
        """Return the names of the amounts that are smaller than in `other`."""
        return tuple(name for name in RESOURCE_UNITS if getattr(self, name) + _SLACK < getattr(other, name))

    def __add__(self, other: Resources) -> Resources:
        return Resources(**{name: getattr(self, name) + getattr(other, name) for name in RESOURCE_UNITS})

    def __sub__(self, other: Resources) -> Resources:
        """Return the remaining amounts, each at least zero."""
        return Resources(**{name: max(0.0, getattr(self, name) - getattr(other, name)) for name in RESOURCE_UNITS})
