"""Journal records of a DiLoCo job: what each holds, and how it is written and read. Pure.

    began        what the job works with
    term         a parameter server was appointed; unless it continues the run of the one before, in whose term no slice
                 of an earlier one is assigned
    joined       a worker has its member number, or begins with a round; what it was assigned before goes back
    left         a worker is none any more
    assigned     samples were handed out to a worker; again when it begins with a round and keeps them
    contributed  a worker has stated its update of a round, or is known to send one
    refused      an update does not count, of which there may be a few for each worker
    announced    the parameter server is told the members of a round
    round        a round is committed; the samples of its members are used

The job runner writes those of what was handed out. Positions in a slice are those of its order, see
`sample_ledger.SampleSpan`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from hypha_proto.contributions import Contribution
from hypha_proto.ids import DIGEST, PeerId
from hypha_proto.texts import quote
from hypha_scheduler.strategies.base import WriteJournal
from hypha_scheduler.strategies.diloco.sample_ledger import ALL, Count, Position, SampleSpan
from hypha_scheduler.strategies.journal_records import journal_record

if TYPE_CHECKING:
    from hypha_proto.global_model import RoundState


_Number = Annotated[int, msgspec.Meta(ge=1)]
_Digest = Annotated[str, msgspec.Meta(pattern=f"^{DIGEST}$")]


class BeganRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of what a job works with, which a later run must find unchanged but for the workers."""

    dataset: str
    manifest: str | None
    """Digest of the dataset's manifest; None if the data nodes have none."""
    model: str
    """Digest over the files of the start model."""
    seed: int
    batch_size: _Number
    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    """Further settings that decide the weights, such as those of the optimizers."""
    workers: tuple[PeerId, ...] = ()
    """Training workers, in the order that numbers them from 0."""

    def differences(self, found: BeganRecord) -> list[str]:
        """Return how what is `found` differs from it, one line for each setting; workers may differ."""
        names = ("dataset", "manifest", "model", "seed", "batch_size")
        pairs = [(name, getattr(self, name), getattr(found, name)) for name in names]
        settings = sorted({*self.settings, *found.settings})
        pairs += [(name, self.settings.get(name), found.settings.get(name)) for name in settings]
        return [f"{name} is {quote(new)}, and was {quote(old)}" for name, old, new in pairs if old != new]


class TermRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Record of a parameter server's appointment."""

    term: _Number
    server: PeerId
    workers: tuple[PeerId, ...] | None = None
    """Training workers of this run, in their order; None for those of `BeganRecord`."""
    members: tuple[Count, ...] | None = None
    """Member numbers of `workers`; None for their positions."""
    scheduled_for: _Number | None = None
    """Number of workers that the learning-rate schedule is made for; None for that of `workers`."""
    continues: bool = False
    """Whether it takes the place of another parameter server while the workers train on."""

    @property
    def numbers(self) -> dict[PeerId, int]:
        """Return the member number of each worker; empty if the record names no workers."""
        workers = self.workers or ()
        return dict(zip(workers, range(len(workers)) if self.members is None else self.members, strict=False))


class JoinedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of a worker whose executor is started, or begins with a round."""

    worker: PeerId
    member: Count
    round: _Number | None = None
    """Round with which its executor begins; None while it is only being started."""


class LeftRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of a worker that was lost, released or drained."""

    worker: PeerId
    reason: str = ""


class AssignedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of samples that were handed out."""

    worker: PeerId
    dataset: str
    epoch: Count
    slice: Count
    first: Position | None = None
    end: Position | None = None

    def __post_init__(self) -> None:
        if self.span.samples <= 0:
            raise ValueError(f"it has no samples: {self.span}")

    @property
    def span(self) -> SampleSpan:
        """Return the samples."""
        return SampleSpan(self.epoch, self.slice, self.first or 0, ALL if self.end is None else self.end)


class _UpdateRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What an update was computed from."""

    ranges: tuple[SampleSpan, ...]
    """Samples; if they are not stated, those that were handed out and reported."""
    contribution: Contribution | None
    """What the executor states; None if it states nothing."""

    def __post_init__(self) -> None:
        for number, each in enumerate(self.ranges):
            if each.samples <= 0:
                raise ValueError(f"ranges[{number}]: {list(msgspec.structs.astuple(each))} has no samples")


class ContributedRecord(_UpdateRecord, frozen=True, kw_only=True):
    """Record of an update that a worker may send."""

    worker: PeerId
    round: _Number
    samples: Count
    """Its weight in the mean."""
    batches: Count = 0
    update: _Digest | None
    """Digest of the file; None if nobody has stated it."""

    def as_member(self) -> MemberRecord:
        """Return it as part of the record of its round."""
        names = (name for name in MemberRecord.__struct_fields__ if name != "peer")
        return MemberRecord(peer=self.worker, **{name: getattr(self, name) for name in names})


class RefusedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of an update, or statement of one, that the scheduler or the parameter server has refused."""

    worker: PeerId
    round: _Number
    reason: str
    dropped: bool
    """Whether the round goes on without the worker."""


class AnnouncedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of the members of a round as they were announced to the parameter server."""

    round: _Number
    term: _Number
    members: tuple[tuple[PeerId, Count], ...]
    """Peer and number of samples of each."""


class MemberRecord(_UpdateRecord, frozen=True, kw_only=True):
    """A member of a committed round."""

    peer: PeerId
    samples: Count
    batches: Count
    update: _Digest | None


class UnusedRecord(_UpdateRecord, frozen=True, kw_only=True):
    """An update that is part of no round."""

    peer: PeerId
    why: str


class RoundRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of a committed round."""

    round: _Number
    term: _Number
    members: tuple[MemberRecord, ...]
    unused: tuple[UnusedRecord, ...]
    update: _Digest
    """Digest of the file of the outer update."""
    weights_before: _Digest
    weights: _Digest
    loss: float | None


KINDS: Final[Mapping[str, type[msgspec.Struct]]] = {
    "began": BeganRecord,
    "term": TermRecord,
    "joined": JoinedRecord,
    "left": LeftRecord,
    "assigned": AssignedRecord,
    "contributed": ContributedRecord,
    "refused": RefusedRecord,
    "announced": AnnouncedRecord,
    "round": RoundRecord,
}
_NAMES: Final = {kind: name for name, kind in KINDS.items()}


def write_record(record: msgspec.Struct) -> WriteJournal:
    """Return the effect that writes a record."""
    return journal_record(_NAMES[type(record)], record)


def assigned_record(worker: PeerId, dataset: str, span: SampleSpan) -> WriteJournal:
    """Record samples that were handed out to a worker."""
    end = None if span.end == ALL else span.end
    given = AssignedRecord(
        worker=worker, dataset=dataset, epoch=span.epoch, slice=span.index, first=span.first, end=end
    )
    return write_record(given)


def round_record(
    number: int,
    term: int,
    updates: Sequence[ContributedRecord],
    unused: Sequence[UnusedRecord],
    state: RoundState,
    loss: float | None,
) -> WriteJournal:
    """Record a round: which updates made it, and the weights before and after it."""
    record = RoundRecord(
        round=number,
        term=term,
        members=tuple(each.as_member() for each in updates),
        unused=tuple(unused),
        update=state.update,
        weights_before=state.before,
        weights=state.weights,
        loss=loss,
    )
    return write_record(record)
