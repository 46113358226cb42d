"""What a machine has and a job needs: a vector of four amounts with a partial order."""

from __future__ import annotations

from hypha_proto.wire_schema import U32, U64, Amount, Message

_FIELDS = ("gpu", "cpu", "storage", "memory")
_SLACK = 1e-9  # sums of decimal fractions must not make a machine too small for what it just gave back


class Resources(Message, frozen=True):
    """Amounts of a machine. All are finite and not negative."""

    gpu: Amount = 0.0
    """GPU memory, GB."""
    cpu: Amount = 0.0
    """Cores."""
    storage: Amount = 0.0
    """Disk, GB."""
    memory: Amount = 0.0
    """RAM, GB."""

    def covers(self, other: Resources) -> bool:
        """Whether every amount is at least that of `other`."""
        return all(getattr(self, name) + _SLACK >= getattr(other, name) for name in _FIELDS)

    def lacking(self, other: Resources) -> tuple[str, ...]:
        """Names of the amounts that are smaller than in `other`."""
        return tuple(name for name in _FIELDS if getattr(self, name) + _SLACK < getattr(other, name))

    def __add__(self, other: Resources) -> Resources:
        return Resources(**{name: getattr(self, name) + getattr(other, name) for name in _FIELDS})

    def __sub__(self, other: Resources) -> Resources:
        """What is left; never below zero."""
        return Resources(**{name: max(0.0, getattr(self, name) - getattr(other, name)) for name in _FIELDS})


class Timestamp(Message, frozen=True):
    """A wall-clock time as serde writes `SystemTime`. Written for old peers, never compared with a local clock."""

    secs_since_epoch: U64
    nanos_since_epoch: U32

    @classmethod
    def of(cls, seconds: float) -> Timestamp:
        """The time `seconds` after the epoch."""
        whole = int(max(0.0, seconds))
        return cls(secs_since_epoch=whole, nanos_since_epoch=min(999_999_999, int((max(0.0, seconds) - whole) * 1e9)))
