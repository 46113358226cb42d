"""Members of rounds: joining, rejoining, silence, pauses and replaced parameter servers, on a simulated clock."""

from __future__ import annotations

import uuid
from collections.abc import Iterable

import pytest
from support.diloco_simulation import batch_done

from hypha_proto.attempt_id import AttemptId
from hypha_proto.contributions import Contribution, SampleRange, StateContribution
from hypha_proto.ids import PeerId
from hypha_proto.training_reports import BatchDone, Continue, Done, ScheduleUpdate
from hypha_scheduler.strategies.base import EmitEvent
from hypha_scheduler.strategies.diloco.events import continued_event, late_event, suspected_event
from hypha_scheduler.strategies.diloco.records import ContributedRecord
from hypha_scheduler.strategies.diloco.round_effects import (
    AnnounceRound,
    Effect,
    Joined,
    Overdue,
    RoundSettings,
)
from hypha_scheduler.strategies.diloco.rounds import Rounds
from hypha_scheduler.strategies.diloco.sample_ledger import SampleLedger
from hypha_scheduler.strategies.diloco.timeouts import Timeouts
from hypha_scheduler.strategies.diloco.training_state import NotJoinedError, TrainingState

A, B, C, D = (PeerId.from_public_key(bytes([number]) * 32) for number in range(1, 5))
SERVER = PeerId.from_public_key(bytes([98]) * 32)
WEIGHTS = "blake3:" + "1" * 64
BACK = "what it waited for is there"


def make(minimum: int = 2, rounds: int = 6) -> Rounds:
    """Return a job in whose first round A, B and C have reported a batch of a second."""
    timeouts = Timeouts(0, 60.0, 60.0, 60.0)
    limits = RoundSettings(rounds, 64, 16, minimum, timeouts=timeouts)
    made = Rounds(limits, (A, B, C), 0.0)
    for peer in (A, B, C):
        assert made.join(peer, 0.0) == (1, ())
        made.training_began(peer, 0.0)
        batch_done(made, peer, 16, 1.0, 1.0)
    return made


@pytest.fixture
def rounds() -> Rounds:
    return make()


def post(rounds: Rounds, now: float, *peers: PeerId) -> tuple[Effect, ...]:
    return tuple(effect for peer in peers for effect in rounds.update_started(peer, now))


def close(rounds: Rounds, number: int, now: float, *peers: PeerId) -> tuple[Effect, ...]:
    """Commit a round, and let its members begin the next one, each with a batch of a second."""
    effects = rounds.step_committed(number, now)
    for peer in peers:
        rounds.update_merged(peer, now)
    for peer in peers:
        batch_done(rounds, peer, 16, now + 1.0)
    return effects


def silent(rounds: Rounds, until: float) -> list[Effect]:
    """Let the deadlines up to a time pass."""
    found: list[Effect] = []
    while (due := rounds.deadline()) is not None and due <= until:
        found += rounds.expire(due)
    return found


def names(effects: Iterable[Effect]) -> list[str]:
    """Return the names of the events among effects."""
    return [effect.name for effect in effects if isinstance(effect, EmitEvent)]


def announced(effects: tuple[Effect, ...] | list[Effect]) -> list[list[PeerId]]:
    return [[peer for peer, _ in effect.members] for effect in effects if isinstance(effect, AnnounceRound)]


# -------------------------------------------------------------------------------------------------------------- joining


def test_a_joiner_begins_with_the_next_round_and_holds_none_up(rounds: Rounds) -> None:
    rounds.add(D, 2.0)
    assert rounds.join(D, 3.0) == (None, ())
    assert announced(post(rounds, 4.0, A, B, C)) == [[A, B, C]]
    assert rounds.join(D, 4.5) == (None, ())
    close(rounds, 1, 5.0, A, B, C)
    assert rounds.join(D, 6.5) == (2, (Joined(D, 2),))
    assert rounds.join(D, 6.6) == (2, ())  # the answer was lost
    assert announced(post(rounds, 7.0, A, B, C)) == [[A, B, C]]  # it fetches the weights still
    rounds.training_began(D, 7.1)
    assert batch_done(rounds, D, 16, 7.5) == ScheduleUpdate(0)
    assert rounds.goes_on_without(D, 2)


def test_a_joiner_is_expected_after_its_first_batch(rounds: Rounds) -> None:
    rounds.add(D, 2.0)
    rounds.join(D, 3.0)
    post(rounds, 4.0, A, B, C)
    close(rounds, 1, 5.0, A, B, C)
    rounds.join(D, 6.0)
    rounds.training_began(D, 6.0)
    batch_done(rounds, D, 16, 7.0)
    assert announced(post(rounds, 7.0, A, B, C)) == []
    assert announced(post(rounds, 8.0, D)) == [[A, B, C, D]]


def test_a_joiner_that_never_begins_is_replaced(rounds: Rounds) -> None:
    rounds.add(D, 2.0)
    [overdue] = [effect for effect in silent(rounds, 100.0) if isinstance(effect, Overdue) and effect.peer == D]
    assert overdue.reason == "it has not begun to train within 60 s"


@pytest.mark.parametrize("gone", ["lost", "late"])
def test_a_worker_joins_at_once_if_nobody_else_trains(gone: str) -> None:
    rounds = make(minimum=1)
    rounds.add(D, 2.0)
    assert rounds.join(D, 2.0)[0] is None
    if gone == "lost":
        for peer in (A, B, C):
            rounds.worker_lost(peer, "power", 3.0)
    else:
        silent(rounds, 61.0)
        assert all(rounds.is_dropped(peer, 1) for peer in (A, B, C))
    assert rounds.join(D, 61.0)[0] == 1


def test_an_executor_that_does_not_ask_joins_with_its_first_slice_if_its_round_is_open() -> None:
    state = TrainingState(make(), SampleLedger((20, 20)), SERVER)
    state.worker_added(D, 2.0)
    assert state.slice_for(D, 3.0) is not None
    assert not state.rounds.is_preparing(D)
    state.worker_lost(D, "power", 4.0)
    state.worker_added(D, 5.0)
    post(state.rounds, 6.0, A, B, C)
    with pytest.raises(NotJoinedError, match="ask first"):
        state.slice_for(D, 7.0)


def test_samples_that_were_assigned_ahead_hold_no_round_up_and_stay_with_who_joins() -> None:
    state = TrainingState(make(), SampleLedger((20, 20)), SERVER)
    state.worker_added(D, 2.0)
    span = state.slice_for(D, 3.0, ahead=True)
    assert state.rounds.is_preparing(D)
    assert announced(post(state.rounds, 4.0, A, B, C)) == [[A, B, C]]
    state.rounds.step_committed(1, 5.0)
    for now in (6.0, 7.0):  # the answer may be lost
        answer, _ = state.join_round(D, WEIGHTS, now)
        assert (answer.round, answer.keeps, state.slices.held_by(D)) == (2, True, (span,))
    state.executor_lost(D, "it was killed", 8.0)
    assert state.join_round(D, WEIGHTS, 9.0)[0].keeps is None


def test_nobody_joins_a_job_whose_last_round_is_closed() -> None:
    state = TrainingState(make(rounds=1), SampleLedger((20, 20)), SERVER)
    state.worker_added(D, 2.0)
    assert state.join_round(D, WEIGHTS, 3.0)[0].round is None
    post(state.rounds, 4.0, A, B, C)
    state.rounds.step_committed(1, 5.0)
    answer, _ = state.join_round(D, WEIGHTS, 6.0)
    assert (answer.round, answer.reason) == (None, "the last round of the job is closed")
    assert D in state.told_done


# ---------------------------------------------------------------------------------------------- silence and rejoin


def test_a_silent_worker_is_suspected_by_its_own_rhythm_once(rounds: Rounds) -> None:
    batch_done(rounds, A, 16, 2.0)
    batch_done(rounds, B, 16, 2.0)
    for now in (3.0, 4.0, 5.0, 6.0):
        batch_done(rounds, A, 16, now)
        batch_done(rounds, B, 16, now)
    assert silent(rounds, 6.5) == [suspected_event(C, 1, 5.0)]
    assert not [effect for effect in silent(rounds, 7.9) if effect == suspected_event(C, 1, 6.4)]


def test_a_late_worker_that_asks_is_told_to_end_its_round_at_once(rounds: Rounds) -> None:
    post(rounds, 2.0, A, B)
    silent(rounds, 12.0)
    assert batch_done(rounds, C, 16, 12.5) == ScheduleUpdate(0)
    assert rounds.join(C, 13.0) == (None, ())
    close(rounds, 1, 14.0, A, B)
    assert rounds.join(C, 15.5) == (2, (Joined(C, 2),))


def test_a_sending_worker_is_not_suspected_by_the_rhythm_of_its_batches(rounds: Rounds) -> None:
    post(rounds, 2.0, A, B)
    rounds.update_sending(C, 2.0)
    assert silent(rounds, 61.0) == []


# --------------------------------------------------------------------------------------------------------------- pauses


def test_a_round_with_too_few_members_waits_until_another_one_joins() -> None:
    rounds = make(minimum=3)
    post(rounds, 2.0, A, B)
    [paused] = rounds.worker_lost(C, "power", 3.0)
    assert names([paused]) == ["paused"]
    assert silent(rounds, 1000.0) == []
    assert rounds.add(D, 1000.0) == ()  # it has to join first
    number, effects = rounds.join(D, 1001.0)
    assert number == 1
    assert effects == (Joined(D, 1), continued_event(998.0, BACK))
    rounds.training_began(D, 1001.0)
    batch_done(rounds, D, 16, 1002.0)
    assert announced(post(rounds, 1003.0, D)) == [[A, B, D]]


def test_a_late_worker_that_the_round_needs_takes_part_when_it_reports() -> None:
    rounds = make(minimum=3)
    post(rounds, 2.0, A, B)
    effects = silent(rounds, 60.0)
    assert names(effects) == ["worker_suspected", "worker_late", "paused"]
    batch_done(rounds, C, 16, 61.0)
    assert names(rounds.take_effects(61.0)) == ["continued"]
    assert announced(post(rounds, 62.0, C)) == [[A, B, C]]


def test_a_worker_that_does_not_come_back_to_a_paused_job_is_replaced() -> None:
    rounds = make(minimum=3)
    post(rounds, 2.0, A, B)
    assert [effect.peer for effect in silent(rounds, 500.0) if isinstance(effect, Overdue)] == [C]


def test_deadlines_stand_still_without_a_parameter_server(rounds: Rounds) -> None:
    assert names(rounds.server_lost("power", 2.0)) == ["paused"]
    assert post(rounds, 3.0, A, B, C) == ()
    assert rounds.deadline() is None
    continued, found = rounds.server_ready(102.0)
    assert continued == continued_event(100.0, BACK)
    assert announced([found]) == [[A, B, C]]
    assert rounds.deadline() == 102.0 + 2 * 60.0


def test_a_worker_that_reports_while_the_job_stands_still_is_suspected_as_soon_as_ever(rounds: Rounds) -> None:
    post(rounds, 2.0, A, B)
    for now in range(2, 51):
        batch_done(rounds, C, 16, now)
    rounds.postpone(48.0, 2.0)  # from 2 to 50
    assert silent(rounds, 55.5) == [suspected_event(C, 1, 5.0)]


# ---------------------------------------------------------------------------------------------- restarts


def test_a_stated_update_of_an_executor_that_has_died_counts(rounds: Rounds) -> None:
    post(rounds, 2.0, C)
    rounds.restart(C, "killed", 3.0)
    assert announced(post(rounds, 4.0, A, B)) == [[A, B, C]]
    assert rounds.join(C, 4.5) == (None, ())


def test_a_restarted_worker_takes_part_again_if_its_update_did_not_arrive() -> None:
    rounds = make(minimum=3)
    post(rounds, 2.0, A, B, C)
    rounds.restart(C, "killed", 3.0)
    effects = rounds.update_missing(1, C, "it did not arrive", 4.0)
    assert "paused" in names(effects)
    assert rounds.join(C, 5.0)[0] == 1
    assert rounds.update_missing(1, C, "it did not arrive", 5.1) == ()  # a report that was repeated
    rounds.training_began(C, 5.0)
    batch_done(rounds, C, 16, 6.0)
    assert announced(post(rounds, 7.0, C)) == [[A, B, C]]


# ---------------------------------------------------------------------------------------------- samples, state


def state_of(minimum: int = 1) -> TrainingState:
    """Return a job with A and B that have joined."""
    timeouts = Timeouts(0, 60.0, 60.0, 60.0)
    rounds = Rounds(RoundSettings(4, 16, 4, minimum, timeouts=timeouts), (A, B), 0.0)
    rounds.closes_by_commit = True
    state = TrainingState(rounds, SampleLedger((8, 8, 8, 8), 0, 4), SERVER)
    for peer in (A, B):
        assert state.join_round(peer, None, 0.0)[0].round == 1
    return state


def train(state: TrainingState, peer: PeerId, now: float) -> list[SampleRange]:
    span = state.slice_for(peer, now)
    assert span is not None
    state.report(peer, BatchDone(batch_size=4, slices={str(span.index): 4}), now + 1.0)
    return [SampleRange(span.epoch, span.index, span.first, span.first + 4)]


def statement(number: int, ranges: list[SampleRange], update: str) -> StateContribution:
    digest = f"blake3:{update * 64}"
    stated = Contribution(
        round=number, weights=digest, ranges=tuple(ranges), batches=1, batch_size=4, seed=1, optimizer="kept",
        update=digest,
    )  # fmt: skip
    return StateContribution(AttemptId(uuid.UUID(int=1), "train", 0), number, digest, 4, stated)


def test_a_late_update_is_sent_back_without_counting_as_a_fault_and_its_samples_return() -> None:
    state = state_of()
    used = {peer: train(state, peer, 0.0) for peer in (A, B)}
    state.state_contribution(A, statement(1, used[A], "a"), None, 2.0)
    while (due := state.rounds.deadline()) is not None and due < 30.0:
        state.rounds.expire(due)
    assert state.rounds.is_dropped(B, 1)
    late = statement(1, used[B], "b")
    for _ in range(2):
        answer, effects = state.state_contribution(B, late, None, 30.0)
        assert (answer.accepted, answer.rejoin, effects) == (False, True, ())
    assert state.contributions.refusals[B] == 0
    free = {(span.epoch, span.index, at) for span in state.slices.available for at in range(span.first, span.end)}
    [part] = used[B]
    assert {(part.epoch, part.slice, at) for at in range(part.first, part.end)} <= free
    state.join_round(B, WEIGHTS, 31.0)
    assert state.slices.held_by(B) == ()


def announce_and_lose(state: TrainingState) -> None:
    """Let A and B be announced, and B be lost and found again."""
    used = {peer: train(state, peer, 0.0) for peer in (A, B)}
    for peer, name in ((A, "a"), (B, "b")):
        effects = state.state_contribution(peer, statement(1, used[peer], name), None, 2.0)[1]
    assert [type(effect) for effect in effects] == [ContributedRecord, AnnounceRound]
    state.worker_lost(B, "power", 3.0)
    state.worker_added(B, 4.0)


def test_a_worker_that_was_found_again_waits_until_its_former_update_counts_or_not() -> None:
    state = state_of(minimum=2)
    announce_and_lose(state)
    assert state.join_round(B, None, 5.0)[0].round is None
    state.update_missing(1, B, "it did not arrive", 6.0)
    assert state.join_round(B, None, 7.0)[0].round == 1
    assert state.contributions.get(B, 1) is None


def test_what_a_lost_parameter_server_was_told_counts_no_more() -> None:
    state = state_of(minimum=2)
    announce_and_lose(state)
    state.server_changed(None, 5.0)
    assert state.join_round(B, None, 7.0)[0].round == 1
    assert state.contributions.get(B, 1) is None


def test_the_new_life_of_a_worker_keeps_its_samples_when_the_old_update_counts() -> None:
    state = state_of()
    announce_and_lose(state)
    state.members_agreed(1, [A, B])
    state.commit(1, [A, B])
    state.rounds.step_committed(1, 5.0)
    assert state.join_round(B, WEIGHTS, 6.0)[0].round == 2
    assert state.slice_for(B, 7.0) is not None
    assert len(state.slices.held_by(B)) == 1


def test_executors_that_are_done_are_answered_so() -> None:
    rounds = make(rounds=1)
    post(rounds, 2.0, A, B)
    silent(rounds, 12.0)
    rounds.step_committed(1, 13.0)
    assert rounds.update_merged(A, 14.0) == Done()
    assert batch_done(rounds, C, 16, 14.0) == Done()
    assert not rounds.is_over
    effects = silent(rounds, 200.0)
    assert late_event(B, 1, 60.0) in effects  # it never merges the last outer update
    assert rounds.is_over


def test_reports_of_a_former_executor_change_nothing(rounds: Rounds) -> None:
    rounds.restart(C, "killed", 2.0)
    assert batch_done(rounds, C, 16, 2.1) == Continue()
    assert rounds.progress_of(C, 1) == (0, 0)
