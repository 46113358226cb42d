"""Reading GPUs with the unmodified `pynvml`, over a fake of the driver's library."""

# ruff: noqa: N802 - NVML's names

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pynvml
import pytest
from click.testing import CliRunner

from hypha_net.node.config.loader import load_config
from hypha_worker.cli import main
from hypha_worker.config import WorkerConfig
from hypha_worker.hardware import usage
from hypha_worker.hardware.nvml import Gpu, read_gpus

OK, NOT_SUPPORTED, DRIVER_NOT_LOADED = 0, 3, 9


@dataclass
class FakeNvml:
    """The functions of ``libnvidia-ml.so.1`` that are called; each fills in the structures that it gets by pointer."""

    memory: list[int]
    """Bytes of each GPU."""
    busy: list[int | None]
    """Percent; None where it is not reported."""
    init: int = OK
    opened: int = 0
    handles: dict[int, int] = field(default_factory=dict)

    def nvmlInitWithFlags(self, _flags: int) -> int:
        self.opened += self.init == OK
        return self.init

    def nvmlShutdown(self) -> int:
        self.opened -= 1
        return OK

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.memory)
        return OK

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, device: Any) -> int:
        address = 0x1000 + index.value
        ctypes.memmove(device, ctypes.byref(ctypes.c_void_p(address)), ctypes.sizeof(ctypes.c_void_p))
        return OK

    @staticmethod
    def _index(device: Any) -> int:
        return (ctypes.cast(device, ctypes.c_void_p).value or 0) - 0x1000

    def nvmlDeviceGetMemoryInfo(self, device: Any, memory: Any) -> int:
        total = self.memory[self._index(device)]
        memory._obj.total, memory._obj.free, memory._obj.used = total, total - total // 4, total // 4
        return OK

    def nvmlDeviceGetUtilizationRates(self, device: Any, rates: Any) -> int:
        busy = self.busy[self._index(device)]
        if busy is None:
            return NOT_SUPPORTED
        rates._obj.gpu, rates._obj.memory = busy, 1
        return OK

    def nvmlErrorString(self, _code: int) -> bytes:
        return b"of the fake"


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    """Simulate two GPUs, the second of which does not report its utilization."""
    fake = FakeNvml([85_899_345_920, 25_769_803_776], [87, None])
    monkeypatch.setattr(pynvml, "nvmlLib", fake)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    yield fake
    assert fake.opened == 0, "NVML was left open"


def test_gpus_are_read_and_nvml_is_closed_again(nvml: FakeNvml) -> None:
    first, second = read_gpus()
    assert first == Gpu(0, 85_899_345_920, 21_474_836_480, 0.87)
    assert second == Gpu(1, 25_769_803_776, 6_442_450_944, None)


def test_a_machine_without_a_driver_has_no_gpus(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", missing)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    assert read_gpus() == ()
    assert caplog.records == []


def test_a_driver_that_does_not_work_is_logged(nvml: FakeNvml, caplog: pytest.LogCaptureFixture) -> None:
    nvml.init = DRIVER_NOT_LOADED
    caplog.set_level(logging.WARNING)
    assert read_gpus() == ()
    assert "cannot be read: NVML says Driver Not Loaded" in caplog.text


def test_init_writes_the_devices_and_the_configuration_reads_them(nvml: FakeNvml, tmp_path: Path) -> None:
    file = tmp_path / "worker.toml"
    assert CliRunner().invoke(main, ["init", "--out", str(file), "--lan"]).exit_code == 0
    resources = load_config(WorkerConfig, file, {}, {}).config.resources
    assert [(device.index, device.memory) for device in resources.devices] == [(0, 85.8), (1, 25.7)]
    assert resources.gpu == pytest.approx(111.5)


def test_only_the_gpus_of_a_jobs_lease_are_measured(
    nvml: FakeNvml,
    in_lab: Callable[..., None],
    recorded: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(usage, "INTERVAL", 0.1)
    names = ["CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"]
    devices = [{"index": 0, "memory": 80.0}, {"index": 1, "memory": 24.0}]

    async def case(lab: Any) -> None:
        lab.write_script(f"import os\nprint([os.environ.get(name) for name in {names}], flush=True)\ntime.sleep(0.8)\n")
        lease = await lab.scheduler.hire(gpu=60.0, cpu=1.0)
        await lab.scheduler.dispatch(lab.peer, lease, lab.train_spec())
        assert (await lab.scheduler.ended()).outcome == "finished"

    in_lab(case, resources={"cpu": 2.0, "memory": 4.0, "storage": 1.0, "gpu": 104.0, "devices": devices})
    shares = [(value, about["hw.id"]) for name, value, about in recorded.values if name == "hw.gpu.utilization"]
    used = {(value, about["hw.id"]) for name, value, about in recorded.values if name == "hw.gpu.memory.usage"}
    assert set(shares) == {(0.87, "0")}
    assert used == {(21_474_836_480, "0")}
    assert {"hw.gpu.utilization", "hw.gpu.memory.usage"} <= recorded.gone
    assert "['0', '0', 'PCI_BUS_ID']" in caplog.text
