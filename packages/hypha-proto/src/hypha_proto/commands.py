"""Commands of a strategy to a running task, and the answers; they travel on the stream of the task's lease.

Exactly one of the optional fields of a command is set, as in `tasks`. The stream loses and repeats nothing; the newest
command of a kind replaces earlier ones.
"""

from __future__ import annotations

from typing import Annotated

from hypha_proto.ids import PeerId
from hypha_proto.job_spec import SliceAddress
from hypha_proto.round_membership import Member
from hypha_proto.wire_schema import OMIT, U32, U64, Digest, Message


class SetMembers(Message, frozen=True):
    """To a parameter server: aggregate the updates of exactly these members, weighted by samples.

    A later command for the same round replaces the members, for example after a worker was lost, as long as the outer
    step has not been taken.
    """

    round: U32
    members: tuple[Member, ...]
    deadline_ms: U64
    """Time to wait for missing updates, in milliseconds from receipt."""


class SetWorkers(Message, frozen=True):
    """To a parameter server: these workers send updates, and get outer updates, from now on."""

    workers: tuple[PeerId, ...]


class ChangeServer(Message, frozen=True):
    """To a training worker: another parameter server takes the outer steps.

    The worker sends it the update of the open round, if it has stated one.
    """

    term: U32
    """Term of the new parameter server, higher than all before."""
    server: PeerId
    round: U32
    """The open round, the first whose outer step the new parameter server takes."""
    update: Annotated[Digest | None, OMIT] = None
    """Digest of the outer update of the round before, which is committed; None if there is none."""
    outer_update: Annotated[SliceAddress | None, OMIT] = None
    """Where the scheduler serves that update, to workers that did not receive it from the previous parameter server."""


Command = SetMembers | SetWorkers | ChangeServer


class TaskCommand(Message, frozen=True, kw_only=True):
    """One command to an attempt at a task."""

    number: U32
    """Repeated in the answer; no two commands to an attempt have the same."""
    members: Annotated[SetMembers | None, OMIT] = None
    workers: Annotated[SetWorkers | None, OMIT] = None
    server: Annotated[ChangeServer | None, OMIT] = None

    @classmethod
    def of(cls, number: int, command: Command) -> TaskCommand:
        """Return a command with its number."""
        match command:
            case SetMembers():
                return cls(number=number, members=command)
            case SetWorkers():
                return cls(number=number, workers=command)
            case ChangeServer():
                return cls(number=number, server=command)


class CommandAnswer(Message, frozen=True):
    """What became of a command."""

    number: U32
    accepted: bool
    reason: str = ""
    """Why it was not accepted, one line."""
    sends: Annotated[Digest | None, OMIT] = None
    """Answer to `ChangeServer`: digest of the update of the open round that the worker sends to the new parameter
    server; None if it has none."""
