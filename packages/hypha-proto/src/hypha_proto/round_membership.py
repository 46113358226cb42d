"""Who is in a round: the scheduler tells the parameter server (``/hypha-aggregate/0.1.0``, between our own nodes)."""

from __future__ import annotations

import uuid
from typing import Annotated, Final

from hypha_proto.ids import PeerId
from hypha_proto.protocols import AGGREGATE, RpcMethod
from hypha_proto.wire_schema import OMIT, U32, U64, Message


class Member(Message, frozen=True):
    """One contributor to a round and the weight of its update."""

    peer: PeerId
    samples: U64


class RoundMembers(Message, frozen=True):
    """Aggregate the updates of exactly these members, weighted by samples.

    A later message for the same round replaces the members (one was lost) as long as the outer step is not taken.
    """

    job_id: uuid.UUID
    round: U32
    members: tuple[Member, ...]
    deadline_ms: U64
    """How long to wait for missing updates, milliseconds from receipt."""
    traceparent: Annotated[str | None, OMIT] = None


class MembersKnown(Message, frozen=True):
    """`accepted` is false when the round is over or the job unknown; `reason` says which."""

    accepted: bool
    reason: str = ""


class UpdateRefused(Message, frozen=True):
    """The parameter server tells the scheduler which member's update it could not use."""

    job_id: uuid.UUID
    round: U32
    peer: PeerId
    reason: str
    traceparent: Annotated[str | None, OMIT] = None


class RefusalKnown(Message, frozen=True):
    """The scheduler knows."""


ROUND_MEMBERS: Final = RpcMethod[RoundMembers, MembersKnown](AGGREGATE, RoundMembers, MembersKnown, "RoundMembers")
UPDATE_REFUSED: Final = RpcMethod[UpdateRefused, RefusalKnown](AGGREGATE, UpdateRefused, RefusalKnown, "UpdateRefused")
