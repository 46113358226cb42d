"""Replaces the parameter server of a running job under a new term, while its workers train on. Pure.

    lost, failed or draining → another lease → task under the next term → workers are told → announced again

The new parameter server begins with the outer momentum that the scheduler has. The workers have kept their updates of
the open round, and send them to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from hypha_proto.commands import ChangeServer, CommandAnswer
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import SliceAddress
from hypha_scheduler.allocation.auction import RoleRequest
from hypha_scheduler.jobs.artifacts import artifact_dataset
from hypha_scheduler.strategies.base import EmitEvent, Lease, SendCommand, StopTask
from hypha_scheduler.strategies.diloco.events import replaced_event
from hypha_scheduler.strategies.diloco.membership import Effects, Membership
from hypha_scheduler.strategies.diloco.round_effects import StartReady
from hypha_scheduler.strategies.diloco.running_job import JobBuilder, RunningJob
from hypha_scheduler.strategies.diloco.specs import AGGREGATE, LAST_UPDATE

_TAG: Final = "server changed"


@dataclass(frozen=True, slots=True)
class _Told:
    """What a worker was told."""

    peer: PeerId
    term: int
    round: int
    update: str | None
    """Digest of the update of the open round that it had stated then."""


@dataclass(slots=True)
class ServerHandover:
    """The parameter server of one job, and who takes its place."""

    builder: JobBuilder
    running: RunningJob
    membership: Membership
    is_draining: bool = False
    """Whether the worker of the parameter server has announced that it will end: another follows after a round."""
    _standby: Lease | None = None
    """Lease of the next parameter server."""
    _is_replaced: bool = False
    """Whether the job has had another parameter server in this run of the scheduler."""
    _told: dict[str, _Told] = field(default_factory=dict)
    """Messages that are under way, by their tags."""

    # ----------------------------------------------------------------------------------------------------------- leases

    def demand(self, request: RoleRequest, now: float) -> RoleRequest:
        """Return the demand for parameter servers: a second one while the first drains."""
        if self.membership.is_over:
            return replace(request, count=0, minimum=0)
        count = 2 if self.is_draining and self.running.server is not None else 1
        return replace(request, count=count, excluded=self.membership.avoidance.unwanted(AGGREGATE, now))

    def add(self, lease: Lease, now: float) -> Effects:
        """Let a lease take the place of a parameter server: at once, or after the next round if that drains."""
        self._standby = lease
        return () if self.running.server is not None else self._appoint(now)

    def lease_lost(self, lease: Lease) -> None:
        """Forget a lease that no task runs on."""
        if self._standby is not None and self._standby.id == lease.id:
            self._standby = None

    # ------------------------------------------------------------------------------------------------------ replacement

    def lost(self, why: str, now: float) -> Effects:
        """Go on without a parameter server until there is another one."""
        running = self.running
        if running.server is None:
            return ()
        running.server, self.is_draining = None, False
        effects = self.seek(why, now)
        return effects if self._standby is None else (*effects, *self._appoint(now))

    def seek(self, why: str, now: float) -> Effects:
        """Let no deadline pass until there is another parameter server, because the last one is gone."""
        running, self._is_replaced = self.running, True
        running.has_server = False
        event = replaced_event(running.placed.server, AGGREGATE, why)
        return (event, *running.training.server_changed(None, now, why))

    def replace(self, why: str, now: float, *, exclude: bool = True) -> Effects:
        """Stop the parameter server, and let another one take its place."""
        server = self.running.server
        if server is None:
            return ()
        excluded = self.membership.avoidance.exclude(AGGREGATE, server.lease.peer, why, now) if exclude else ()
        return (*excluded, *self.lost(why, now), StopTask(server, why))

    def round_committed(self, now: float) -> Effects:
        """Replace a parameter server that drains, if there is another lease."""
        if not self.is_draining or self._standby is None or self.membership.is_over:
            return ()
        return self.replace("its worker drains", now, exclude=False)

    def _appoint(self, now: float) -> Effects:
        """Start a parameter server under the next term."""
        running, lease = self.running, self._standby
        assert lease is not None
        self._standby, term = None, running.term + 1
        has_momentum = self.membership.commits.last > 0 and self.builder.job.outer_optimizer.momentum > 0
        running.placed = replace(running.placed, server=lease.peer, term=term, has_momentum=has_momentum)
        running.gone_members.clear()
        server = running.add_server(lease)
        running.commands = self.builder.commands(running.training, server, term, running.workers)
        self.membership.commits.wake()
        record = self.builder.term_record(running, continues=True)
        return (record, StartReady())

    # --------------------------------------------------------------------------------------------------- the new server

    def started(self, now: float) -> Effects:
        """Use a parameter server whose task has started: tell the workers, and announce the open round again."""
        running = self.running
        known = running.commands.open()
        if running.server is None or not self._is_replaced:
            return known
        told = self.tell_workers()
        changed = running.training.server_changed(running.server.lease.peer, now)
        return (*known, *told, *changed)

    def tell_workers(self) -> Effects:
        """Tell the workers of the parameter server whose specifications name another one."""
        effects: Effects = ()
        for peer, term in self.running.server_terms.items():
            if term >= self.running.term or peer not in self.running.workers:
                continue
            effects = (*effects, *self._command(peer))
        return effects

    def _command(self, peer: PeerId) -> tuple[SendCommand, ...]:
        running, last = self.running, self.membership.commits.last
        task = running.task_of(running.workers[peer])
        if running.server is None or task is None:
            return ()
        number, tag = last + 1, f"{_TAG} {running.term} {peer}"
        stated = running.training.contributions.get(peer, number)
        self._told[tag] = _Told(peer, running.term, number, None if stated is None else stated.update)
        dataset = artifact_dataset(running.placed.job_id, LAST_UPDATE)
        command = ChangeServer(
            term=running.term,
            server=running.server.lease.peer,
            round=number,
            update=self.membership.commits.update if last else None,
            outer_update=SliceAddress(dataset=dataset, index=0) if last else None,
        )
        about: dict[str, str | int | float | bool] = {"hypha.term": running.term, "hypha.peer.id": str(peer)}
        return (SendCommand(task, command, tag, "name parameter server", about),)

    def on_answer(self, tag: str, outcome: object, now: float) -> Effects | None:
        """Handle the response of a worker that was told; None if `tag` is of another message."""
        told = self._told.pop(tag, None)
        if told is None:
            return None
        running = self.running
        if told.term != running.term or told.peer not in running.workers:
            return ()
        if not isinstance(outcome, CommandAnswer) or not outcome.accepted:
            why = outcome.reason if isinstance(outcome, CommandAnswer) else str(outcome)
            return self.membership.release(told.peer, f"it was not told of the new parameter server: {why}", now)
        running.server_terms[told.peer] = told.term
        stated = running.training.contributions.get(told.peer, told.round)
        if told.update in (None, outcome.sends) or stated is None or stated.update != told.update:
            return ()
        if running.training.rounds.is_announced(told.round):  # it may have arrived, and count already
            return running.training.rounds.hurry()
        why = "its worker has not kept it"
        event = EmitEvent("update_missing", {"round": told.round, "worker": str(told.peer), "reason": why})
        return (event, *running.training.update_missing(told.round, told.peer, why, now))
