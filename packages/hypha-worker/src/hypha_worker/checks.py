"""Checks of a worker's folders, GPUs, isolation and executors, for ``run --check`` and ``probe``."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import anyio

from hypha_net.node.checks import Check, check_folder, failed, ok, warning
from hypha_worker.config import WorkerConfig, not_installed
from hypha_worker.executors.isolation.assessment import assess
from hypha_worker.executors.isolation.stack import make_stack
from hypha_worker.executors.runtimes import ExecutorSection, HostSettings, find_runtime
from hypha_worker.hardware.detection import free_bytes
from hypha_worker.hardware.devices import device_nodes
from hypha_worker.hardware.nvml import read_gpus


def check_worker(config: WorkerConfig, *, live: bool) -> Iterator[Check]:
    """Check what only workers have; with `live` also run the checks of the executors."""
    yield from check_folder("work_dir", config.work_dir)
    yield from check_storage(config)
    if config.cache.path is not None:
        yield from check_folder("cache.path", config.cache.path)
    yield from check_gpus(config)
    yield from check_isolation(config, live=live)
    for number, executor in enumerate(config.executors):
        if not executor.is_installed:
            yield failed(not_installed(number, executor))
        elif executor.cmd is not None:
            yield (
                check_start(number, executor, config)
                if live
                else ok(f"executors[{number}].cmd: {executor.cmd!r} is found")
            )


def check_storage(config: WorkerConfig) -> Iterator[Check]:
    """Warn of more storage than the disk of the work directory has free: a job that uses it would fail."""
    storage, free = config.resources.storage, free_bytes(config.work_dir) / 1e9
    if storage > free:
        yield warning(
            f"resources.storage = {storage:g}: {free:.1f} GB of the disk of work_dir {config.work_dir} are free; offer "
            "less, or free some"
        )


def check_gpus(config: WorkerConfig) -> Iterator[Check]:
    """Check that the GPUs of the configuration exist; those of AMD are known by their device nodes only."""
    listed = config.resources.devices
    if not listed and not config.resources.gpu:
        return
    found = {gpu.index: gpu for gpu in read_gpus()}
    if not found and not device_nodes(None):
        what = f"resources.devices lists {len(listed)}" if listed else f"resources.gpu = {config.resources.gpu:g}"
        yield failed(f"{what}, and this machine has no GPU: install the driver, or leave it out")
        return
    if not found:
        yield warning("resources: the driver of the GPUs does not tell their memory; compare it yourself")
        return
    for number, device in enumerate(listed):
        what = f"resources.devices[{number}].index = {device.index}"
        if device.index in found:
            yield ok(f"{what}: found, {found[device.index].memory / 1e9:.1f} GB")
        else:
            there = ", ".join(map(str, sorted(found)))
            yield failed(f"{what}: the driver reports no such GPU, only {there}: correct the list")
    if not listed:
        total = sum(gpu.memory for gpu in found.values()) / 1e9
        yield ok(f"resources.gpu = {config.resources.gpu:g}: found {len(found)} GPUs with {total:.1f} GB")


def check_isolation(config: WorkerConfig, *, live: bool) -> Iterator[Check]:
    """Check that the required layers work; without them a worker does not start. With `live` tell what stays open."""
    if not config.isolation.require and not live:
        return
    found = make_stack(config.work_dir, disabled=config.isolation.disable).findings
    if live:
        for aspect in assess(found):
            state = ok if aspect.state == "contained" else warning
            yield state(f"isolation, {aspect.name}: {aspect.state}: {aspect.detail}")
    for name in config.isolation.require:
        if found[name].works:
            yield ok(f"isolation.require: {name} works")
        else:
            yield failed(f"isolation.require: {name} does not work here; hypha-worker probe tells why, or remove it")


def check_start(number: int, executor: ExecutorSection, config: WorkerConfig) -> Check:
    """Look for an executor's command in its sandbox, and run its `check` there, as a worker does when it starts."""
    with tempfile.TemporaryDirectory(prefix="hypha-probe-") as name:
        folder = Path(name)
        host = HostSettings(
            folder,
            has_devices=False,
            logs=config.log_folder(),
            stack=make_stack(folder, config.private_paths(), config.isolation.disable),
        )
        check = find_runtime(executor.runtime).find_fault
        fault = anyio.run(check, executor, host, folder, backend="trio")
    what = f"executors[{number}], {executor.kind}"
    if fault is not None:
        return failed(f"{what}: {fault}")
    return ok(f"{what}: {executor.cmd!r} is found in its sandbox{', and its check passes' if executor.check else ''}")
