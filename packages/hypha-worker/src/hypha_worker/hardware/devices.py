"""The GPUs that leases are made of: which there are, how a job's processes are told of theirs, and their device nodes.

CUDA takes GPUs by UUID, in the order in which the processes then number them from 0. ROCm filters twice:
``ROCR_VISIBLE_DEVICES`` chooses among all GPUs, and ``HIP_VISIBLE_DEVICES`` among those by their new numbers; where it
is not set, HIP reads ``CUDA_VISIBLE_DEVICES``. https://docs.nvidia.com/cuda/cuda-c-programming-guide/#env-vars
https://rocm.docs.amd.com/en/latest/conceptual/gpu-isolation.html
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from hypha_proto.resources import GIGABYTE
from hypha_worker.hardware.nvml import Gpu, read_gpus
from hypha_worker.leasing.capacity import Capacity, GpuCapacity

_log = logging.getLogger(__name__)

_TOLERANCE: Final = 0.1
"""Share by which ``resources.gpu`` may differ from the detected sum: a GPU of 24 GB has 25.8 billion bytes."""
_DEVICE_FOLDER: Final = Path("/dev")
_KFD_TOPOLOGY: Final = Path("/sys/class/kfd/kfd/topology/nodes")
_NVIDIA_CONTROL: Final = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")
_RENDER_MINOR: Final = re.compile(r"^drm_render_minor ([1-9][0-9]*)$", re.MULTILINE)


def find_devices(stated: Capacity) -> Capacity:
    """Return the capacity of a worker with its devices and their UUIDs. Takes up to a second: call it in a thread.

    Args:
        stated: that of the configuration. If it lists no devices but the memory of the detected ones sums up to its
            GPU memory, these are returned, each with its share of that.
    """
    gpu = stated.resources.gpu
    if not stated.devices and not gpu:
        return stated
    found = read_gpus()
    if stated.devices:
        return replace(stated, devices=_identify(stated.devices, found))
    total = sum(each.memory for each in found) / GIGABYTE
    if found and abs(total - gpu) <= _TOLERANCE * total:
        shares = ((each, each.memory / GIGABYTE * gpu / total) for each in found)
        devices = tuple(GpuCapacity(each.index, share, each.uuid, each.minor) for each, share in shares)
        return replace(stated, devices=devices)
    _warn_about_undivided(found, total, gpu)
    return replace(stated, largest_gpu=max((each.memory / GIGABYTE for each in found), default=math.inf))


def _identify(listed: Sequence[GpuCapacity], found: Sequence[Gpu]) -> tuple[GpuCapacity, ...]:
    by_index = {gpu.index: gpu for gpu in found}
    for device in listed:
        if found and device.index not in by_index:
            _log.warning(
                "resources.devices: the driver reports no GPU with index %d, only %s: correct the list, or jobs on it "
                "will see no GPU",
                device.index,
                ", ".join(str(index) for index in sorted(by_index)),
            )
    known = ((device, by_index.get(device.index)) for device in listed)
    return tuple(device if gpu is None else replace(device, uuid=gpu.uuid, minor=gpu.minor) for device, gpu in known)


def _warn_about_undivided(found: Sequence[Gpu], total: float, gpu: float) -> None:
    reason = f"the GPUs of this machine have {total:.1f} GB in all" if found else "no GPU is detected by NVML"
    _log.warning(
        "resources.gpu is %g GB, and %s: one lease at a time gets GPU memory, and its job sees every GPU; list the "
        "GPUs in [[resources.devices]] to lease them one by one",
        gpu,
        reason,
    )


def visibility_variables(devices: Sequence[GpuCapacity] | None) -> dict[str, str]:
    """Return the environment variables by which processes see only `devices`, numbered from 0.

    By UUID where the driver gives them, else by index. `None` stands for every GPU: no variables.
    """
    if devices is None:
        return {}
    uuids = [device.uuid for device in devices if device.uuid is not None]
    by_uuid = len(uuids) == len(devices)
    indices = ",".join(str(device.index) for device in devices)
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(uuids) if by_uuid else indices,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # NVML's order; CUDA's default differs
        "ROCR_VISIBLE_DEVICES": "" if by_uuid else indices,  # NVML's UUIDs are of NVIDIA's GPUs: none is AMD's
        "HIP_VISIBLE_DEVICES": "" if by_uuid else ",".join(str(number) for number in range(len(devices))),
    }


def device_nodes(
    devices: Sequence[GpuCapacity] | None, *, folder: Path = _DEVICE_FOLDER, topology: Path = _KFD_TOPOLOGY
) -> list[Path]:
    """Return the device nodes that processes need for `devices`, and no other GPU's; those that exist.

    Args:
        devices: `None` stands for every GPU of the machine.
        folder: where the nodes are.
        topology: where the driver of AMD's GPUs describes them.
    """
    if devices is not None and not devices:
        return []
    nvidia, amd = _nvidia_nodes(devices, folder), _amd_nodes(devices, folder, topology)
    return [*_with_control(nvidia, folder, _NVIDIA_CONTROL), *_with_control(amd, folder, ("kfd",))]


def _with_control(nodes: Sequence[Path], folder: Path, control: Sequence[str]) -> list[Path]:
    """Return the nodes of devices that exist after those that all devices of the driver share, if there are any."""
    present = [node for node in nodes if node.exists()]
    return [*(folder / name for name in control if (folder / name).exists()), *present] if present else []


def _nvidia_nodes(devices: Sequence[GpuCapacity] | None, folder: Path) -> list[Path]:
    if devices is None:
        return sorted(path for path in folder.glob("nvidia[0-9]*") if path.name.removeprefix("nvidia").isdecimal())
    return [folder / f"nvidia{device.index if device.minor is None else device.minor}" for device in devices]


def _amd_nodes(devices: Sequence[GpuCapacity] | None, folder: Path, topology: Path) -> list[Path]:
    """Return the render nodes of AMD's GPUs, which ROCm numbers in the order of the driver's topology."""
    nodes = [folder / "dri" / f"renderD{minor}" for minor in _render_minors(topology)]
    if devices is None:
        return nodes
    return [nodes[device.index] for device in devices if device.uuid is None and device.index < len(nodes)]


def _render_minors(topology: Path) -> list[str]:
    described = (
        [node / "properties" for node in topology.iterdir() if node.name.isdecimal()] if topology.is_dir() else []
    )
    texts = [path.read_text() for path in sorted(described, key=lambda path: int(path.parent.name))]
    return [found[1] for text in texts if (found := _RENDER_MINOR.search(text))]
