"""Policies for members that come and go: how an executor has ended, restarts, slots and timeouts."""

from __future__ import annotations

import uuid

import pytest

from hypha_proto.ids import PeerId
from hypha_scheduler.strategies.base import TaskEnded, TaskState
from hypha_scheduler.strategies.diloco.retries import ExecutorRetries, FailJob, Replace, Restart, end_of_process
from hypha_scheduler.strategies.diloco.specs import Slot, Slots
from hypha_scheduler.strategies.diloco.timeouts import FACTOR, START, STEP, Timeouts
from hypha_scheduler.strategies.silence import SLOW_RATE

PEERS = [PeerId.from_public_key(bytes([n + 1]) * 32) for n in range(4)]
LEASES = [uuid.UUID(int=n + 1) for n in range(4)]


def failed(code: int | None = 1, reason: str = "", *lines: str) -> TaskEnded:
    return TaskEnded(TaskState.FAILED, reason, code, lines)


KILLED = failed(-9, "was ended by SIGKILL", "round 3: 12 batches")


class TestExecutorRetries:
    def test_an_executor_is_restarted_twice_then_its_worker_replaced(self) -> None:
        retries = ExecutorRetries()
        end = failed(1, "exited with status 1", "ValueError: bad slice")
        assert retries.count_failure(PEERS[0], LEASES[0], end, 16) == Restart()
        assert retries.count_failure(PEERS[0], LEASES[0], end, 16) == Restart()
        third = retries.count_failure(PEERS[0], LEASES[0], end, 16)
        assert isinstance(third, Replace)
        assert "3 times" in third.reason
        assert "bad slice" in third.reason

    def test_the_last_line_of_a_killed_executor_is_no_reason(self) -> None:
        retries = ExecutorRetries()
        decisions = [retries.count_failure(PEERS[0], LEASES[0], KILLED, 16) for _ in range(3)]
        assert isinstance(decisions[2], Replace)
        assert "was ended by SIGKILL" in decisions[2].reason
        assert "12 batches" not in decisions[2].reason

    def test_a_new_lease_of_the_same_peer_starts_anew(self) -> None:
        retries = ExecutorRetries()
        for _ in range(2):
            retries.count_failure(PEERS[0], LEASES[0], failed(), 16)
        assert retries.count_failure(PEERS[0], LEASES[1], failed(), 16) == Restart()

    @pytest.mark.parametrize(
        "end",
        [
            failed(75, "exited with status 75", "MemoryError"),
            KILLED,
            failed(137),
            failed(1, "the memory limit of the job ended it"),
        ],
    )
    def test_memory_halves_the_micro_batch(self, end: TaskEnded) -> None:
        retries = ExecutorRetries()
        assert retries.count_failure(PEERS[0], LEASES[0], end, 16) == Restart(8)
        assert retries.count_failure(PEERS[0], LEASES[0], end, 16) == Restart(4)
        assert isinstance(retries.count_failure(PEERS[0], LEASES[0], end, 16), Replace)
        assert retries.micro_batch(LEASES[0]) == 4

    def test_it_is_half_of_what_the_executor_has_computed_at_once(self) -> None:
        retries = ExecutorRetries()
        assert retries.count_failure(PEERS[0], LEASES[0], failed(75), 6) == Restart(3)
        assert retries.count_failure(PEERS[0], LEASES[0], failed(75), 16) == Restart(1), "it was told 3 since"

    def test_a_worker_whose_memory_does_not_suffice_for_one_sample_is_replaced(self) -> None:
        decision = ExecutorRetries().count_failure(PEERS[0], LEASES[0], failed(75), 1)
        assert isinstance(decision, Replace)
        assert "one sample at a time" in decision.reason

    def test_a_signal_alone_does_not_show_that_and_other_failures_keep_the_micro_batch(self) -> None:
        retries = ExecutorRetries()
        assert retries.count_failure(PEERS[0], LEASES[0], KILLED, 1) == Restart(1)
        assert retries.count_failure(PEERS[0], LEASES[0], failed(1), 1) == Restart(1)

    def test_three_rounds_that_count_forget_failures_but_not_the_micro_batch(self) -> None:
        retries = ExecutorRetries()
        for _ in range(2):
            retries.count_failure(PEERS[0], LEASES[0], KILLED, 64)
        for _ in range(3):
            retries.round_counted(PEERS[0])
        assert retries.count_failure(PEERS[0], LEASES[0], failed(1), 64) == Restart(16)

    def test_two_rounds_do_not(self) -> None:
        retries = ExecutorRetries()
        for _ in range(2):
            retries.count_failure(PEERS[0], LEASES[0], failed(), 16)
            retries.round_counted(PEERS[0])
        retries.round_counted(PEERS[0])
        assert isinstance(retries.count_failure(PEERS[0], LEASES[0], failed(), 16), Replace)

    def test_an_invalid_job_ends_at_once_with_its_last_lines(self) -> None:
        end = failed(2, "exited with status 2", "a", "no such layer")
        decision = ExecutorRetries().count_failure(PEERS[0], LEASES[0], end, 16)
        assert isinstance(decision, FailJob)
        assert decision.reason == "executor failed, exit code 2: exited with status 2\n  | a\n  | no such layer"

    def test_the_same_error_on_two_workers_ends_the_job(self) -> None:
        retries = ExecutorRetries()
        assert retries.count_failure(PEERS[0], LEASES[0], failed(1, "x", "job 7: KeyError: 'a'"), 16) == Restart()
        assert retries.count_failure(PEERS[1], LEASES[1], failed(1, "x", "another error"), 16) == Restart()
        decision = retries.count_failure(PEERS[2], LEASES[2], failed(1, "x", "job 8: KeyError: 'a'"), 16)
        assert isinstance(decision, FailJob)
        assert str(PEERS[0]) in decision.reason
        assert "  | job 8: KeyError: 'a'" in decision.reason

    def test_without_output_the_reason_decides(self) -> None:
        retries = ExecutorRetries()
        retries.count_failure(PEERS[0], LEASES[0], failed(1, "no such program"), 16)
        assert isinstance(retries.count_failure(PEERS[1], LEASES[1], failed(1, "no such program"), 16), FailJob)

    @pytest.mark.parametrize("end", [KILLED, failed(75, "", "MemoryError"), failed(-15, "was ended by SIGTERM", "x")])
    def test_signals_and_memory_on_two_workers_do_not(self, end: TaskEnded) -> None:
        retries = ExecutorRetries()
        decisions = [retries.count_failure(peer, lease, end, 16) for peer, lease in zip(PEERS, LEASES, strict=True)]
        assert all(isinstance(decision, Restart) for decision in decisions)

    def test_an_error_is_forgotten_when_its_worker_trains_again(self) -> None:
        retries = ExecutorRetries()
        retries.count_failure(PEERS[0], LEASES[0], failed(1, "", "CUDA error"), 16)
        for _ in range(3):
            retries.round_counted(PEERS[0])
        assert retries.count_failure(PEERS[1], LEASES[1], failed(1, "", "CUDA error"), 16) == Restart()


class TestSlots:
    def test_members_are_numbered_and_never_reused(self) -> None:
        slots = Slots(2)
        assert [slots.add(peer) for peer in PEERS[:2]] == [Slot(0, 0), Slot(1, 1)]
        slots.held.pop(PEERS[0])
        assert slots.add(PEERS[2]) == Slot(2, 0)
        slots.held.pop(PEERS[2])
        assert slots.add(PEERS[0]) == Slot(3, 0)

    def test_workers_beyond_the_shares_evaluate_nothing(self) -> None:
        slots = Slots(1)
        slots.add(PEERS[0])
        assert slots.add(PEERS[1]) == Slot(1, None)

    def test_a_worker_keeps_its_slot(self) -> None:
        slots = Slots(2)
        assert slots.add(PEERS[0]) == slots.add(PEERS[0]) == slots.held.get(PEERS[0])
        slots.held.pop(PEERS[0])
        assert slots.held.get(PEERS[0]) is None

    def test_restored_numbers_are_kept_and_later_ones_are_new(self) -> None:
        slots = Slots(3, 6)
        assert slots.restore(PEERS[1], 4) == Slot(4, 0)
        assert slots.add(PEERS[0]) == Slot(6, 1)


class TestTimeouts:
    def test_before_anything_is_measured_sizes_decide(self) -> None:
        timeouts = Timeouts(model_bytes=100_000_000, workers=4)
        assert timeouts.start_timeout() == START + 100_000_000 / SLOW_RATE
        assert timeouts.step_timeout() == STEP + 5 * 100_000_000 / SLOW_RATE

    def test_measured_durations_replace_the_fixed_ones(self) -> None:
        timeouts = Timeouts(model_bytes=1_000_000)
        for seconds in (1.0, 200.0):
            timeouts.starts.append(seconds)
            timeouts.steps.append(seconds)
            timeouts.merges.append(seconds)
        assert {timeouts.start_timeout(), timeouts.step_timeout(), timeouts.merge_timeout()} == {FACTOR * 200.0}

    def test_fast_workers_leave_a_slow_one_the_time_of_its_transfers(self) -> None:
        timeouts = Timeouts(model_bytes=1_000_000_000)
        timeouts.starts.append(5.0)
        timeouts.merges.append(1.0)
        assert timeouts.merge_timeout() == 1000.0
        assert timeouts.start_timeout() == START + 1000.0

    def test_a_short_duration_leaves_time_and_an_old_one_is_forgotten(self) -> None:
        timeouts = Timeouts(model_bytes=1)
        timeouts.steps.append(100.0)
        for _ in range(20):
            timeouts.steps.append(0.1)
        assert timeouts.step_timeout() == 30.0

    def test_configured_timeouts_override(self) -> None:
        timeouts = Timeouts(1 << 30, start=5.0, step=6.0, merge=7.0)
        timeouts.starts.append(100.0)
        assert (timeouts.start_timeout(), timeouts.step_timeout(), timeouts.merge_timeout()) == (5.0, 6.0, 7.0)


SEVERAL = """\
W1123 12:50:10.746000 24755 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 24782 closing signal
E1123 12:50:10.748000 24755 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {code}) local_rank
Traceback (most recent call last):
  File "/venv/bin/accelerate", line 10, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
hypha.accelerate_executor.training FAILED
------------------------------------------------------------
Failures:
[1]:
  rank      : 1 (local_rank: 1)
  exitcode  : -15 (pid: 24782)  (SIGTERM)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : {code} (pid: 24781)
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================"""
ONE = """\
Traceback (most recent call last):
  File "/venv/bin/accelerate", line 10, in <module>
    sys.exit(main())
subprocess.CalledProcessError: Command '['python', '-m', 'x']' returned non-zero exit status {code}."""
KILLED_ONE = """\
Traceback (most recent call last):
  File "/venv/bin/accelerate", line 10, in <module>
    sys.exit(main())
subprocess.CalledProcessError: Command '['python', '-m', 'x']' died with <Signals.SIGKILL: 9>."""


def ended(code: int, *lines: str) -> TaskEnded:
    return TaskEnded(TaskState.FAILED, f"the executor exited with status {code}", code, lines)


@pytest.mark.parametrize("text", [SEVERAL, ONE])
@pytest.mark.parametrize("code", [74, 75, 2])
def test_the_exit_code_is_that_of_the_process(text: str, code: int) -> None:
    launched = text.format(code=code).splitlines()
    found = end_of_process(ended(1, "ERROR hypha.x: the reason", "INFO hypha.x: joined at round 3", *launched))
    assert found.exit_code == code
    assert found.last_lines == ("INFO hypha.x: joined at round 3", "ERROR hypha.x: the reason")


def test_a_signal_is_that_of_the_process() -> None:
    assert end_of_process(ended(1, *SEVERAL.format(code=-9).splitlines())).exit_code == -9
    assert end_of_process(ended(1, *KILLED_ONE.splitlines())).exit_code == -9


def test_what_another_program_prints_stays_as_it_is() -> None:
    lines = ("Traceback (most recent call last):", '  File "x.py", line 1', "ValueError: no")
    assert end_of_process(ended(1, *lines)) == ended(1, *lines)
    assert end_of_process(ended(75, *ONE.format(code=3).splitlines())).exit_code == 75


def test_a_full_disk_and_an_invalid_job_behind_a_launcher_are_known() -> None:
    retries = ExecutorRetries()
    for code, follows in ((74, Replace), (2, FailJob)):
        end = ended(1, *ONE.format(code=code).splitlines())
        assert isinstance(retries.count_failure(PEERS[0], LEASES[0], end, 16), follows)


@pytest.mark.parametrize("launcher", ["", SEVERAL.format(code=1)])
def test_different_errors_of_two_workers_do_not_end_the_job(launcher: str) -> None:
    """What they printed last is the same."""
    retries = ExecutorRetries()
    for number, error in enumerate(("slice 3 is malformed", "another process has ended")):
        lines = (f"ERROR hypha.x: {error}", "INFO hypha.x: joined at round 3", *launcher.splitlines())
        assert retries.count_failure(PEERS[number], LEASES[number], ended(1, *lines), 16) == Restart()


@pytest.mark.parametrize("launcher", ["", SEVERAL.format(code=1)])
def test_the_same_error_of_two_workers_ends_the_job(launcher: str) -> None:
    """What they printed last differs."""
    retries = ExecutorRetries()
    for number, text in enumerate(("loss nothing", "ready")):
        lines = ("ERROR hypha.x: the model lacks a tensor", f"INFO hypha.x: {text}", *launcher.splitlines())
        found = retries.count_failure(PEERS[number], LEASES[number], ended(1, *lines), 16)
    assert isinstance(found, FailJob)
    assert found.reason.splitlines()[-1] == "  | ERROR hypha.x: the model lacks a tensor"
