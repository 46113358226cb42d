"""Rounds with simulated executors on a simulated clock."""

from __future__ import annotations

import uuid

import pytest
from support.diloco_simulation import batch_done

from hypha_net.errors import RequestTimeoutError
from hypha_proto.commands import CommandAnswer
from hypha_proto.ids import PeerId
from hypha_proto.training_reports import Acknowledged, Continue, Done, ReportError, ScheduleUpdate
from hypha_scheduler.strategies.base import EmitEvent, Lease, TaskRef
from hypha_scheduler.strategies.diloco.contributions import Contributions
from hypha_scheduler.strategies.diloco.events import continued_event, late_event, suspected_event
from hypha_scheduler.strategies.diloco.round_effects import (
    AnnounceRound,
    Effect,
    RoundClosed,
    RoundSettings,
    StepOverdue,
)
from hypha_scheduler.strategies.diloco.rounds import Rounds
from hypha_scheduler.strategies.diloco.server_commands import ServerCommands
from hypha_scheduler.strategies.diloco.timeouts import Timeouts

PEERS = [PeerId.from_public_key(bytes([n + 1]) * 32) for n in range(5)]


def test_late_starter_takes_part_with_few_batches() -> None:
    rounds = Rounds(RoundSettings(3, 960, 16, 3), PEERS[:3], 0.0)
    for peer in PEERS[:2]:
        rounds.training_began(peer, 0.0)
    for step in range(1, 31):  # both train what the round needs
        for peer in PEERS[:2]:
            batch_done(rounds, peer, 16, step * 0.1, 0.1)
    assert rounds.update_started(PEERS[0], 3.1) == rounds.update_started(PEERS[1], 3.1) == ()
    rounds.training_began(PEERS[2], 4.0)
    answer = batch_done(rounds, PEERS[2], 16, 4.1, 0.1)
    assert isinstance(answer, ScheduleUpdate)
    assert answer.counter < 4


def begun(limits: RoundSettings, workers: int) -> Rounds:
    """Return rounds in which each worker has trained a batch of a second."""
    made = Rounds(limits, PEERS[:workers], 0.0)
    for peer in PEERS[:workers]:
        made.training_began(peer, 0.0)
        batch_done(made, peer, 16, 1.0, 1.0)
    return made


def make(minimum: int = 2, rounds: int = 2) -> Rounds:
    return begun(RoundSettings(rounds, 64, 16, minimum), 3)


@pytest.fixture
def rounds() -> Rounds:
    return make()


def pause_reason(effect: Effect) -> str:
    assert isinstance(effect, EmitEvent)
    assert effect.name == "paused"
    return str(effect.fields["reason"])


def test_too_few_members_pause_the_job_with_the_reason() -> None:
    rounds = make(minimum=3)
    [effect] = rounds.worker_lost(PEERS[1], "its lease was not renewed", 3.0)
    reason = pause_reason(effect)
    assert str(PEERS[1]) in reason
    assert "its lease was not renewed; 2 of at least 3 remain" in reason
    assert rounds.pause.reason == reason


def expire_next(rounds: Rounds) -> tuple[float, tuple[Effect, ...]]:
    """Let the next deadline pass; return when that was, and what follows."""
    due = rounds.deadline()
    assert due is not None
    assert rounds.expire(due - 0.01) == ()
    return due, rounds.expire(due)


@pytest.mark.parametrize(("trained", "waited"), [(1, 0.5), (4, 2.0), (20, 5.0)])
def test_round_continues_without_late_workers(rounds: Rounds, trained: int, waited: float) -> None:
    """The two others wait no longer together than it has trained, and never over twice a silence that is suspicious."""
    for at in range(2, trained + 1):
        batch_done(rounds, PEERS[2], 16, at)
    batch_done(rounds, PEERS[0], 16, trained + 1.0)
    rounds.update_started(PEERS[0], trained + 1.0)
    rounds.update_started(PEERS[1], trained + 1.0)
    assert expire_next(rounds) == (trained + 5.0, (suspected_event(PEERS[2], 1, 5.0),))  # 2 s and three of its batches
    announced = AnnounceRound(1, ((PEERS[0], 32), (PEERS[1], 16)))
    late_at = trained + 5.0 + waited
    assert expire_next(rounds) == (late_at, (late_event(PEERS[2], 1, late_at), announced))


def run_round(rounds: Rounds, number: int, posted: dict[PeerId, float], stepped: float) -> RoundClosed:
    """Close round `number`: workers send their updates at these times, the outer step is at `stepped`."""
    effects: tuple[Effect, ...] = ()
    for peer, at in sorted(posted.items(), key=lambda entry: entry[1]):
        batch_done(rounds, peer, 16, at)
        effects += rounds.update_started(peer, at)
        rounds.metrics_reported(peer, number, 0.5)
    effects += rounds.outer_step_taken(stepped)[1]
    [closed] = [effect for effect in effects if isinstance(effect, RoundClosed)]
    return closed


def test_waits_include_the_time_until_a_late_worker_is_left_out(rounds: Rounds) -> None:
    for peer, at in ((PEERS[0], 2.0), (PEERS[1], 3.0)):
        rounds.metrics_reported(peer, 1, 0.5)
        rounds.update_started(peer, at)
    expire_next(rounds)
    due, _ = expire_next(rounds)
    [closed] = rounds.outer_step_taken(due + 1)[1]
    assert isinstance(closed, RoundClosed)
    assert closed.waits == {PEERS[0]: due - 2.0, PEERS[1]: due - 3.0}


@pytest.mark.parametrize("again", [False, True], ids=["before its update", "while it sends its update"])
def test_waits_include_the_time_until_a_worker_is_lost(rounds: Rounds, again: bool) -> None:
    for peer, at in ((PEERS[0], 2.0), (PEERS[1], 3.0), (PEERS[2], 4.0))[: 3 if again else 2]:
        rounds.metrics_reported(peer, 1, 0.5)
        rounds.update_started(peer, at)
    rounds.worker_lost(PEERS[2], "power", 32.0)
    [closed] = rounds.outer_step_taken(34.0)[1]
    assert isinstance(closed, RoundClosed)
    assert closed.waits == {PEERS[0]: 30.0, PEERS[1]: 29.0}


def test_waits_without_late_workers_end_with_the_last_update(rounds: Rounds) -> None:
    closed = run_round(rounds, 1, {PEERS[0]: 2.0, PEERS[1]: 3.0, PEERS[2]: 5.0}, 8.0)
    assert closed.waits == {PEERS[0]: 3.0, PEERS[1]: 2.0, PEERS[2]: 0.0}


@pytest.mark.parametrize("seconds", [0.5, None], ids=["with the duration of a batch", "from an older executor"])
def test_first_round_begins_with_the_first_batch(seconds: float | None) -> None:
    rounds = Rounds(RoundSettings(1, 32, 16, min_members=1, timeout=6.0), PEERS[:2], 0.0)
    for peer in PEERS[:2]:
        rounds.training_began(peer, 5.0)  # it gets a slice, which takes 20 s to arrive
    assert rounds.expire(24.0) == ()
    batch_done(rounds, PEERS[0], 16, 25.0, seconds)
    began = 24.5 if seconds else 25.0
    assert rounds.deadline() == began + 6.0
    batch_done(rounds, PEERS[1], 16, 26.0, seconds)
    closed = run_round(rounds, 1, {PEERS[0]: 27.0, PEERS[1]: 27.0}, 28.0)
    assert closed.seconds == 28.0 - began


@pytest.mark.parametrize("seconds", [1e308, -5.0, float("nan"), float("inf")])
def test_first_batch_did_not_begin_before_its_slice_nor_after_its_report(seconds: float) -> None:
    rounds = Rounds(RoundSettings(1, 32, 16, min_members=1, timeout=6.0), PEERS[:1], 0.0)
    rounds.training_began(PEERS[0], 5.0)
    batch_done(rounds, PEERS[0], 16, 25.0, seconds)
    due = rounds.deadline()
    assert due is not None
    assert 11.0 <= due <= 31.0


def test_round_timeout_starts_when_executors_have_started() -> None:
    rounds = Rounds(RoundSettings(rounds=2, target=64, batch_size=16, min_members=1, timeout=10.0), PEERS[:2], 0.0)
    assert rounds.deadline() == 600.0
    assert rounds.expire(30.0) == ()
    rounds.training_began(PEERS[0], 30.0)
    rounds.training_began(PEERS[1], 44.0)
    assert rounds.deadline() == 600.0
    batch_done(rounds, PEERS[0], 16, 45.0, 5.0)
    assert rounds.deadline() == 50.0
    batch_done(rounds, PEERS[1], 16, 45.0, 1.0)
    assert rounds.deadline() == 50.0
    for peer in PEERS[:2]:
        rounds.update_started(peer, 46.0)
    rounds.outer_step_taken(47.0)
    rounds.update_merged(PEERS[0], 48.0)
    assert rounds.deadline() == 58.0


def test_pause_for_want_of_late_workers_names_the_timeout() -> None:
    rounds = Rounds(RoundSettings(1, 96, 16, min_members=2, timeout=6.0), PEERS[:2], 0.0)
    rounds.training_began(PEERS[0], 5.0)
    batch_done(rounds, PEERS[0], 16, 8.0, 1.0)
    effect = rounds.expire(13.0)[-1]
    assert "(raise rounds.timeout, 6 s, to wait for longer); 0 of at least 2 remain" in pause_reason(effect)


def test_last_round_does_not_wait_for_a_late_executor() -> None:
    rounds = begun(RoundSettings(rounds=1, target=96, batch_size=16, min_members=1, timeout=10.0), 2)
    rounds.update_started(PEERS[0], 2.0)
    assert rounds.expire(6.0) == (suspected_event(PEERS[1], 1, 5.0),)
    assert rounds.expire(10.0) == (late_event(PEERS[1], 1, 10.0), AnnounceRound(1, ((PEERS[0], 16),)))
    assert not rounds.is_over
    rounds.outer_step_taken(11.0)
    assert rounds.update_merged(PEERS[0], 12.0) == Done()
    assert rounds.is_over
    assert rounds.deadline() is None
    assert batch_done(rounds, PEERS[1], 16, 13.0) == Done()


def test_parameter_server_that_takes_no_outer_step_is_replaced(rounds: Rounds) -> None:
    for peer in PEERS[:3]:
        rounds.update_started(peer, 2.0)
    due, [overdue, paused] = expire_next(rounds)
    assert isinstance(overdue, StepOverdue)
    assert "the parameter server took no outer step" in overdue.reason
    assert "took no outer step" in pause_reason(paused)
    assert rounds.deadline() is None
    [continued, announced] = rounds.server_ready(due + 5.0)
    assert continued == continued_event(5.0, "what it waited for is there")
    assert announced == AnnounceRound(1, tuple((peer, 16) for peer in PEERS[:3]))


def test_outer_step_deadline_includes_the_round_timeout() -> None:
    rounds = begun(RoundSettings(rounds=1, target=32, batch_size=16, min_members=1, timeout=10.0), 2)
    for peer in PEERS[:2]:
        rounds.update_started(peer, 2.0)
    assert rounds.expire(2.0 + 10.0 + 30.0) == ()
    rounds.outer_step_taken(45.0)
    assert rounds.closed == 1


def test_repeated_reports_get_the_same_response(rounds: Rounds) -> None:
    for peer in PEERS[:3]:
        rounds.update_started(peer, 2.0)
    assert isinstance(rounds.outer_step_taken(3.0)[0], Acknowledged)
    assert isinstance(rounds.outer_step_taken(3.1)[0], Acknowledged)
    assert isinstance(rounds.update_merged(PEERS[0], 3.2), Continue)
    assert isinstance(rounds.update_merged(PEERS[0], 3.3), Continue)
    assert rounds.closed == 1


def test_every_round_is_reported_if_workers_without_loss_merge_before_the_outer_step_report() -> None:
    rounds = make(rounds=3)
    for number in (1, 2):
        for peer in PEERS[:3]:
            if number > 1:
                batch_done(rounds, peer, 16, 3.0)
            rounds.update_started(peer, 4.0)
        if number == 1:
            rounds.outer_step_taken(5.0)
        for peer in PEERS[:3]:
            rounds.update_merged(peer, 5.0)
    effects = (*rounds.outer_step_taken(6.0)[1], *rounds.finish())
    reported = [effect.round for effect in effects if isinstance(effect, RoundClosed)]
    assert reported == [1, 2]


@pytest.mark.parametrize("report", ["updated", "merged", "not a member"])
def test_unexpected_reports_get_an_error(rounds: Rounds, report: str) -> None:
    answer = {
        "updated": lambda: rounds.outer_step_taken(1.0)[0],
        "merged": lambda: rounds.update_merged(PEERS[0], 1.0),
        "not a member": lambda: batch_done(rounds, PEERS[4], 16, 1.0),
    }[report]()
    assert isinstance(answer, ReportError)


def test_round_whose_last_batch_meets_the_target_is_not_overdue() -> None:
    began = 1e6
    rounds = Rounds(RoundSettings(rounds=1, target=32, batch_size=16, min_members=2), PEERS[:2], began)
    for peer in PEERS[:2]:
        rounds.training_began(peer, began)
    for _ in range(2):
        batch_done(rounds, PEERS[0], 16, began + 12.0)
    assert batch_done(rounds, PEERS[1], 16, began + 15.0) == ScheduleUpdate(counter=0)
    assert [effect for effect in rounds.expire(began + 44.0) if not isinstance(effect, EmitEvent)] == []
    due = rounds.deadline()
    assert due is not None
    assert due >= began + 45.0


def test_losing_a_worker_after_the_last_outer_step_does_not_fail_the_job() -> None:
    rounds = begun(RoundSettings(rounds=1, target=32, batch_size=16, min_members=2), 2)
    for peer in PEERS[:2]:
        rounds.update_started(peer, 2.0)
    rounds.outer_step_taken(3.0)
    assert rounds.update_merged(PEERS[0], 4.0) == Done()
    assert rounds.worker_lost(PEERS[1], "power", 5.0) == ()
    assert rounds.is_over


@pytest.mark.parametrize("samples", [None, 320], ids=["of unknown size", "of 320 samples"])
@pytest.mark.parametrize("last", [False, True], ids=["between rounds", "after the last"])
def test_a_worker_that_evaluates_is_waited_for_four_times_as_long_as_it_would_train(
    last: bool, samples: int | None
) -> None:
    rounds = Rounds(
        RoundSettings(1 if last else 2, 32, 16, 2, evaluate_every=1, evaluation_samples=samples), PEERS[:2], 0.0
    )
    longest = 600.0 + (86400.0 if samples is None else 4 * samples * 1.0 / 16)
    for peer in PEERS[:2]:
        rounds.training_began(peer, 0.0)
        batch_done(rounds, peer, 16, 1.0)
        rounds.update_started(peer, 2.0)
    rounds.outer_step_taken(3.0)
    if not last:
        assert rounds.update_merged(PEERS[0], 4.0) == Continue()  # it had nothing to evaluate
        batch_done(rounds, PEERS[0], 16, 5.0)
        rounds.update_started(PEERS[0], 6.0)
    assert rounds.expire(3.0 + longest - 1.0) == ()
    rounds.update_merged(PEERS[1], 3.0 + longest)
    if not last:
        batch_done(rounds, PEERS[1], 16, 4.0 + longest)
        assert (rounds.deadline() or 0.0) < longest + 90.0


def test_a_worker_that_stops_before_it_merges_an_evaluated_round_is_late() -> None:
    """After its first evaluation, what that took counts."""
    settings = RoundSettings(9, 32, 16, 2, evaluate_every=1, timeouts=Timeouts(0, 60.0, 60.0, 60.0))
    rounds = Rounds(settings, PEERS[:3], 0.0)
    for number, now in ((1, 0.0), (2, 14.0)):
        for peer in PEERS[:3]:
            rounds.training_began(peer, now)
            batch_done(rounds, peer, 16, now + 1.0)
        for peer in PEERS[:3]:
            rounds.update_started(peer, now + 2.0)
        rounds.step_committed(number, now + 3.0)
        for peer in PEERS[: 3 if number == 1 else 2]:
            rounds.update_merged(peer, now + 13.0)
    for peer in PEERS[:2]:
        batch_done(rounds, peer, 16, 28.0)
        rounds.update_started(peer, 29.0)
    found: list[object] = []
    while (due := rounds.deadline()) is not None and due < 120.0:
        found += rounds.expire(due)
    suspected, late = ({**effect.fields, "name": effect.name} for effect in found if isinstance(effect, EmitEvent))
    assert (suspected["name"], late["name"]) == ("worker_suspected", "worker_late")
    assert suspected["worker"] == late["worker"] == str(PEERS[2])
    assert suspected["seconds"] == pytest.approx(2.0 + 3 * 10.0)
    assert late["seconds"] < 90.0


def merge_round(rounds: Rounds, number: int, peers: list[PeerId], now: float) -> dict[PeerId, object]:
    """Close a round of these members and let each merge; return the responses to them."""
    closed = run_round(rounds, number, dict.fromkeys(peers, now), now + 1)
    assert set(closed.samples) == set(peers)
    return {peer: rounds.update_merged(peer, now + 2) for peer in peers}


def test_draining_workers_stay_as_long_as_the_job_needs_them() -> None:
    rounds = make(minimum=2, rounds=4)
    for peer in PEERS[:2]:
        rounds.drain(peer)
    answers = merge_round(rounds, 1, PEERS[:3], 5.0)
    assert [type(answers[peer]) for peer in PEERS[:3]] == [Done, Continue, Continue]
    answers = merge_round(rounds, 2, PEERS[1:3], 10.0)
    assert [type(answer) for answer in answers.values()] == [Continue, Continue]
    [effect] = rounds.worker_lost(PEERS[1], "it ended", 13.0)
    assert "it ended" in pause_reason(effect)


def test_drain_of_a_stranger_changes_nothing(rounds: Rounds) -> None:
    rounds.drain(PEERS[4])
    assert rounds.members.keys() == set(PEERS[:3])


A, B, C = (PeerId.from_public_key(bytes([n]) * 32) for n in range(3))
SERVER = TaskRef("aggregate", Lease(uuid.UUID(int=1), C, "aggregate", 1.0))
ACCEPTED = CommandAnswer(0, accepted=True)
REJECTED = CommandAnswer(0, accepted=False, reason="round 1 is over, round 2 runs")


@pytest.mark.parametrize(
    ("first", "fails"), [(ACCEPTED, False), (REJECTED, True), (RequestTimeoutError("no answer"), True)]
)
def test_rejected_change_of_an_accepted_round_does_not_fail_the_job(first: object, fails: bool) -> None:
    """Until the parameter server reports its outer step, a lost member makes the scheduler announce the round again."""
    commands = ServerCommands(SERVER, 1, Contributions())
    [sent] = commands.announce(AnnounceRound(1, ((A, 4), (B, 4))))
    assert [member.peer for member in sent.command.members] == [A, B]
    failure, following = commands.members_answered(first, closed=0)
    assert (failure is not None, following) == (fails, ())
    if not fails:
        [again] = commands.announce(AnnounceRound(1, ((A, 4),)))
        assert [member.peer for member in again.command.members] == [A]
        assert commands.members_answered(REJECTED, closed=0) == (None, ())


def test_an_announcement_waits_for_the_response_to_the_one_before() -> None:
    commands = ServerCommands(SERVER, 1, Contributions())
    assert len(commands.announce(AnnounceRound(1, ((A, 4), (B, 4))))) == 1
    assert commands.announce(AnnounceRound(1, ((A, 4),))) == ()
    assert commands.announce(AnnounceRound(1, ((B, 4),))) == ()
    failure, [following] = commands.members_answered(REJECTED, closed=0)
    assert failure is None  # the later announcement replaces the one that was rejected
    assert [member.peer for member in following.command.members] == [B]
    assert commands.members_answered(ACCEPTED, closed=0) == (None, ())
