"""Round membership: the scheduler announces to the parameter server whose updates make up a round.

Uses the extension ``/hypha-aggregate/0.1.0``; peers of the older network do not have it.
"""

from __future__ import annotations

import uuid
from typing import Annotated, Final

from hypha_proto.ids import PeerId
from hypha_proto.protocols import AGGREGATE, RpcMethod
from hypha_proto.wire_schema import OMIT, U32, U64, Digest, Message


class Member(Message, frozen=True):
    """One contributor to a round."""

    peer: PeerId
    samples: U64
    """Number of samples behind its update: the weight in the mean."""
    update: Annotated[Digest | None, OMIT] = None
    """Digest of its update, as it was stated to the scheduler; an update with another one is refused."""


class RoundMembers(Message, frozen=True):
    """Request to aggregate the updates of exactly these members, weighted by samples.

    A later message for the same round replaces the members, for example after a worker was lost, as long as the outer
    step has not been taken.
    """

    job_id: uuid.UUID
    round: U32
    members: tuple[Member, ...]
    deadline_ms: U64
    """Time to wait for missing updates, in milliseconds from receipt."""
    term: Annotated[U32 | None, OMIT] = None
    """`AggregateConfig.term` of the parameter server that is meant."""
    traceparent: Annotated[str | None, OMIT] = None


class MembersKnown(Message, frozen=True):
    """Response to `RoundMembers`."""

    accepted: bool
    """False if the round is already closed or the job unknown."""
    reason: str = ""
    """Why the members were not accepted."""


class UpdateRefused(Message, frozen=True):
    """Report of the parameter server to the scheduler that it cannot use a member's update."""

    job_id: uuid.UUID
    round: U32
    peer: PeerId
    """The member."""
    reason: str
    missing: Annotated[bool | None, OMIT] = None
    """Whether the update did not arrive in time: that is no fault of what it holds."""
    traceparent: Annotated[str | None, OMIT] = None


class RefusalKnown(Message, frozen=True):
    """Acknowledgement of `UpdateRefused`."""


ROUND_MEMBERS: Final = RpcMethod[RoundMembers, MembersKnown](AGGREGATE, RoundMembers, MembersKnown, "RoundMembers")
UPDATE_REFUSED: Final = RpcMethod[UpdateRefused, RefusalKnown](AGGREGATE, UpdateRefused, RefusalKnown, "UpdateRefused")
