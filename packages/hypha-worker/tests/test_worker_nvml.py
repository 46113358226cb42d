"""Reading GPUs with the unmodified `pynvml`, over a fake of the driver's library."""

# ruff: noqa: N802 - NVML's names

from __future__ import annotations

import ctypes
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pynvml
import pytest
from click.testing import CliRunner

from hypha_net.node.config.loader import load_config
from hypha_proto.resources import Resources
from hypha_worker.cli import main
from hypha_worker.config import WorkerConfig
from hypha_worker.hardware import usage
from hypha_worker.hardware.devices import device_nodes, find_devices
from hypha_worker.hardware.nvml import Gpu, read_gpus
from hypha_worker.leasing.capacity import Capacity, GpuCapacity

OK, NOT_SUPPORTED, DRIVER_NOT_LOADED = 0, 3, 9


@dataclass
class FakeNvml:
    """The functions of ``libnvidia-ml.so.1`` that are called; each fills in the structures that it gets by pointer."""

    memory: list[int]
    """Bytes of each GPU."""
    busy: list[int | None]
    """Percent; None where it is not reported."""
    uuids: list[str | None] = field(default_factory=lambda: ["GPU-aaaa0000", "GPU-bbbb0001"])
    minors: list[int] = field(default_factory=lambda: [1, 0])
    """Numbers of the device nodes, which need not be in the order of the PCI bus."""
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

    def nvmlDeviceGetUUID(self, device: Any, uuid: Any, _size: Any) -> int:
        known = self.uuids[self._index(device)]
        if known is None:
            return NOT_SUPPORTED
        uuid.value = known.encode()
        return OK

    def nvmlDeviceGetMinorNumber(self, device: Any, minor: Any) -> int:
        minor._obj.value = self.minors[self._index(device)]
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
    assert first == Gpu(0, 85_899_345_920, 21_474_836_480, 0.87, "GPU-aaaa0000", 1)
    assert second == Gpu(1, 25_769_803_776, 6_442_450_944, None, "GPU-bbbb0001", 0)


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


LISTED = {"devices": [{"index": 0, "memory": 80.0}, {"index": 1, "memory": 24.0}]}


async def test_only_the_gpus_of_a_jobs_lease_are_measured(
    nvml: FakeNvml, in_lab: Any, recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "INTERVAL", 0.1)
    async with in_lab(resources={"cpu": 2.0, "memory": 4.0, "storage": 1.0, "gpu": 104.0, **LISTED}) as lab:
        await lab.start("while not os.path.exists(work_dir + '/go'): time.sleep(0.01)\n", gpu=60.0, cpu=1.0)
        wanted = {"hw.gpu.utilization", "hw.gpu.memory.usage"}
        await lab.scheduler.until(lambda: wanted <= {name for name, *_ in recorded.values})
        lab.let_all_go()
        assert (await lab.scheduler.ended()).outcome == "finished"
    shares = [(value, about["hw.id"]) for name, value, about in recorded.values if name == "hw.gpu.utilization"]
    used = {(value, about["hw.id"]) for name, value, about in recorded.values if name == "hw.gpu.memory.usage"}
    assert set(shares) == {(0.87, "0")}
    assert used == {(21_474_836_480, "0")}
    assert {"hw.gpu.utilization", "hw.gpu.memory.usage"} <= recorded.gone


VARIABLES = ["CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"]


@pytest.fixture
def seen_by_a_job(in_lab: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs a job on a lease with some GPU memory; it returns the variables of its process."""
    caplog.set_level(logging.INFO)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    async def run(resources: dict[str, Any], gpu: float) -> Any:
        async with in_lab(resources={"cpu": 2.0, "memory": 4.0, "storage": 1.0, **resources}) as lab:
            script = f"import os\nprint('seen', json.dumps([os.environ.get(name) for name in {VARIABLES}]))\n"
            await lab.start(script, cpu=1.0, gpu=gpu)
            assert (await lab.scheduler.ended()).outcome == "finished"
            [line] = [record.getMessage() for record in caplog.records if "seen [" in record.getMessage()]
        return json.loads(line.partition("seen ")[2])

    return run


@pytest.mark.parametrize(
    ("resources", "gpu", "seen"),
    [
        (LISTED, 20.0, ["GPU-bbbb0001", "", "", "PCI_BUS_ID"]),
        (LISTED, 0.0, ["", "", "", "PCI_BUS_ID"]),
        ({"gpu": 104.0}, 20.0, ["GPU-bbbb0001", "", "", "PCI_BUS_ID"]),
        ({"gpu": 104.0}, 0.0, ["", "", "", "PCI_BUS_ID"]),
        ({"gpu": 48.0}, 20.0, [None, None, None, None]),
        ({"gpu": 48.0}, 0.0, ["", "", "", "PCI_BUS_ID"]),
        ({"gpu": 0.0}, 0.0, [None, None, None, None]),
    ],
    ids=["listed", "listed-none", "detected", "detected-none", "undivided", "undivided-none", "not-offered"],
)
async def test_a_job_sees_the_gpus_of_its_lease_only(
    nvml: FakeNvml, seen_by_a_job: Any, resources: dict[str, Any], gpu: float, seen: list[str | None]
) -> None:
    assert await seen_by_a_job(resources, gpu) == seen


async def test_without_uuids_gpus_are_visible_by_index(nvml: FakeNvml, seen_by_a_job: Any) -> None:
    nvml.uuids = ["GPU-aaaa0000", None]
    assert await seen_by_a_job(LISTED, 20.0) == ["1", "1", "0", "PCI_BUS_ID"]


@pytest.mark.parametrize(("gpu", "shares"), [(104.0, [80.0, 24.0]), (111.7, [85.92, 25.78]), (120.0, [92.31, 27.69])])
def test_gpus_are_detected_if_their_sum_is_what_the_owner_offers(
    nvml: FakeNvml, gpu: float, shares: list[float]
) -> None:
    found = find_devices(Capacity(Resources(gpu=gpu)))
    assert [round(device.memory, 2) for device in found.devices] == shares
    assert [(device.index, device.uuid, device.minor) for device in found.devices] == [
        (0, "GPU-aaaa0000", 1),
        (1, "GPU-bbbb0001", 0),
    ]


def test_gpus_whose_sum_differs_are_not_leased_one_by_one(nvml: FakeNvml, caplog: pytest.LogCaptureFixture) -> None:
    found = find_devices(Capacity(Resources(gpu=48.0)))
    assert (found.devices, found.largest_gpu) == ((), pytest.approx(85.9, abs=0.01))
    assert "resources.gpu is 48 GB, and the GPUs of this machine have 111.7 GB in all" in caplog.text
    assert "list the GPUs in [[resources.devices]]" in caplog.text


def test_a_listed_gpu_that_the_driver_does_not_report_is_a_warning(
    nvml: FakeNvml, caplog: pytest.LogCaptureFixture
) -> None:
    [device] = find_devices(Capacity(Resources(), (GpuCapacity(7, 24.0),))).devices
    assert (device, device.uuid) == (GpuCapacity(7, 24.0), None)
    assert "the driver reports no GPU with index 7, only 0, 1" in caplog.text


def test_a_worker_that_offers_no_gpu_does_not_open_nvml(nvml: FakeNvml, caplog: pytest.LogCaptureFixture) -> None:
    nvml.init = DRIVER_NOT_LOADED
    assert find_devices(Capacity(Resources())).devices == ()
    assert caplog.records == []


def make_nodes(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def test_the_device_nodes_of_a_lease_are_those_of_its_gpus(tmp_path: Path) -> None:
    make_nodes(
        tmp_path, "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia0", "nvidia1", "nvidia10", "nvidia-caps/cap1"
    )
    first, second = GpuCapacity(0, 80.0, "GPU-aaaa0000", 1), GpuCapacity(1, 24.0, "GPU-bbbb0001", 0)

    def names(devices: tuple[GpuCapacity, ...] | None) -> list[str]:
        return [path.relative_to(tmp_path).as_posix() for path in device_nodes(devices, folder=tmp_path)]

    control = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"]
    assert names((first,)) == [*control, "nvidia1"]
    assert names((first, second)) == [*control, "nvidia1", "nvidia0"]
    assert names((GpuCapacity(10, 24.0),)) == [*control, "nvidia10"]
    assert names(()) == []
    assert names(None) == [*control, "nvidia0", "nvidia1", "nvidia10"]
    assert names((GpuCapacity(7, 24.0, None, 7),)) == [], "without its node, the others are of no use"


def test_the_device_nodes_of_amd_gpus_follow_the_drivers_topology(tmp_path: Path) -> None:
    folder, topology = tmp_path / "dev", tmp_path / "nodes"
    make_nodes(folder, "kfd", "dri/renderD128", "dri/renderD129")
    for node, minor in (("0", 0), ("1", 129), ("10", 128)):  # node 0 is the processor
        make_nodes(topology, f"{node}/properties")
        (topology / node / "properties").write_text(f"simd_count 4\ndrm_render_minor {minor}\nunique_id 7\n")

    def names(devices: tuple[GpuCapacity, ...] | None) -> list[str]:
        found = device_nodes(devices, folder=folder, topology=topology)
        return [path.relative_to(folder).as_posix() for path in found]

    assert names((GpuCapacity(0, 24.0),)) == ["kfd", "dri/renderD129"]
    assert names((GpuCapacity(1, 24.0),)) == ["kfd", "dri/renderD128"]
    assert names((GpuCapacity(1, 24.0, "GPU-bbbb0001"),)) == [], "NVIDIA's"
    assert names(None) == ["kfd", "dri/renderD129", "dri/renderD128"]
