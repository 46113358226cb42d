"""The environment and the arguments of an executor's process. Called by `process_runner`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from hypha_worker.executors.process.process_tree import TOKEN_VARIABLE
from hypha_worker.hardware.devices import visibility_variables
from hypha_worker.leasing.capacity import Allocation


def make_environment(
    configured: Mapping[str, str],
    values: Mapping[str, str],
    allocation: Allocation,
    token: str,
    *,
    traceparent: str | None = None,
    has_devices: bool = False,
) -> dict[str, str]:
    """Return the environment of a process.

    Args:
        configured: the executor's own variables.
        values: the value of each placeholder in them.
        allocation: what the lease has allocated: the number of threads, and the devices.
        token: marks the processes of one run.
        traceparent: span that the process's own spans belong to.
        has_devices: whether the worker offers GPUs, so that a job sees only those of its lease.
    """
    own = {name: substitute(value, values) for name, value in configured.items()}
    threads = {"OMP_NUM_THREADS": str(max(1, int(allocation.resources.cpu)))}
    devices = visibility_variables(allocation.visible_devices) if has_devices else {}
    trace = {"TRACEPARENT": traceparent} if traceparent else {}
    return {**threads, **os.environ, **own, **devices, **trace, TOKEN_VARIABLE: token}


def substitute(text: str, values: Mapping[str, str]) -> str:
    """Replace each placeholder by its value; placeholders inside values are not replaced."""
    names: Sequence[str] = sorted(values, key=text.find)
    first = next((name for name in names if name in text), None)
    if first is None:
        return text
    before, after = text.split(first, 1)
    return before + values[first] + substitute(after, values)
