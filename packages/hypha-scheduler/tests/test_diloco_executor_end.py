"""How a process has ended that was started by `accelerate launch`, from what that has printed."""

from __future__ import annotations

import uuid

import pytest

from hypha_proto.ids import PeerId
from hypha_scheduler.strategies.base import TaskEnded, TaskState
from hypha_scheduler.strategies.diloco.executor_end import end_of_process
from hypha_scheduler.strategies.diloco.retries import ExecutorRetries, FailJob, Replace, Restart

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
KILLED = """\
Traceback (most recent call last):
  File "/venv/bin/accelerate", line 10, in <module>
    sys.exit(main())
subprocess.CalledProcessError: Command '['python', '-m', 'x']' died with <Signals.SIGKILL: 9>."""
PEERS = [PeerId.from_public_key(bytes([n + 1]) * 32) for n in range(2)]
LEASES = [uuid.UUID(int=n + 1) for n in range(2)]


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
    assert end_of_process(ended(1, *KILLED.splitlines())).exit_code == -9


def test_what_another_program_prints_stays_as_it_is() -> None:
    lines = ("Traceback (most recent call last):", '  File "x.py", line 1', "ValueError: no")
    assert end_of_process(ended(1, *lines)) == ended(1, *lines)
    assert end_of_process(ended(75, *ONE.format(code=3).splitlines())).exit_code == 75


def test_exhausted_memory_behind_a_launcher_halves_the_micro_batch_on_every_worker() -> None:
    retries = ExecutorRetries()
    end = ended(1, "ERROR hypha.x: out of memory: CUDA out of memory", *SEVERAL.format(code=75).splitlines())
    assert [retries.count_failure(PEERS[n], LEASES[n], end, 16) for n in (0, 1)] == [Restart(8)] * 2


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
