"""Checks that what Hypha does to the files of a model keeps it the model that was trained: `check-model`.

All weights of a loaded model are changed, and the change takes the way of a job: an executor writes it as its update, a
parameter server computes the outer update, a scheduler adds it to the start model and writes the result. The result is
loaded again, and its weights and outputs are compared with those of the changed model.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch

from hypha.accelerate_executor.diloco.replica import Replica
from hypha.accelerate_executor.errors import DeliveryError
from hypha.accelerate_executor.modeling.delivery import check_delivery, copy_companions
from hypha.accelerate_executor.modeling.hf import load_model, load_stored_model
from hypha_proto.global_model import GlobalModel
from hypha_proto.job_spec import Nesterov
from hypha_proto.outer_step import inspect_update, outer_step
from hypha_proto.update_file import UpdateMetadata

logger = logging.getLogger(__name__)

_CHANGE: Final = 0.02
"""Standard deviation of the changes."""
_ROWS: Final = 2
_TOKENS: Final = 12
_SOUND: Final = 4000


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """What was compared."""

    model: str
    """Name of the model's class."""
    tensors: int
    """Exchanged tensors of its files."""
    aliases: int
    """Further names that the files have for some of them."""
    converted: int
    """Tensors that the library renames, splits or fuses when it loads them."""
    difference: float | None
    """Largest difference of the outputs, relative to the largest output; None if the model does not take the
    made-up inputs."""


def check_round_trip(task: str, model_dir: Path, allowed: Collection[str] = (), seed: int = 0) -> RoundTrip:
    """Change the weights of a model by a round of training, deliver it, and compare it with the changed one.

    Args:
        task: wire name of the task.
        model_dir: the model; it stays as it is.
        allowed: modules whose classes models of task `torch` may use.
        seed: decides the changes.

    Raises:
        DeliveryError: the delivered model has other weights.
        ExecutorError: the model cannot be loaded or trained.
        TensorFileError, OSError: a file cannot be written or read.
    """
    module = load_model(task, model_dir, allowed=allowed)
    replica = Replica(module, model_dir)
    with TemporaryDirectory() as made:
        delivered_dir = _deliver(replica, model_dir, Path(made), torch.Generator().manual_seed(seed))
        check_delivery(task, model_dir, replica, allowed)
        delivered = load_stored_model(task, delivered_dir, allowed=allowed)
    if differing := replica.find_differing(delivered):
        raise DeliveryError(f"{len(differing)} of {len(replica.members)} tensors differ, first {differing[0]!r}")
    with torch.no_grad():
        for name, value in replica.delivered().items():
            replica.members[name].copy_(value)
    return RoundTrip(
        model=type(module).__name__,
        tensors=len(replica.names),
        aliases=len(replica.mapping.aliases),
        converted=len(replica.names - replica.members.keys()),
        difference=_compare_outputs(module.to(next(delivered.parameters()).dtype), delivered),
    )


def _deliver(replica: Replica, model_dir: Path, folder: Path, chance: torch.Generator) -> Path:
    """Change all weights, and return the directory of the model that the scheduler would write after such a round."""
    update, outer = folder / "update.safetensors", folder / "outer.safetensors"
    with torch.no_grad():
        for member in replica.members.values():
            change = torch.randn(member.shape, generator=chance) * _CHANGE
            member.add_(change if member.is_floating_point() else 1)
    replica.write_update(update, 1, _ROWS)
    layout = inspect_update(update).layout
    metadata = UpdateMetadata(round=1, statistics=layout.statistics, aliases=layout.aliases)
    plain = Nesterov(learning_rate=1.0, momentum=0.0)
    outer_step([(update, 1.0)], folder / "momentum.safetensors", outer, plain, metadata)
    written = GlobalModel(model_dir, folder / "outer-state", plain)
    written.add(outer, 1)
    copy_companions(model_dir, folder / "model")
    written.write_model(1, folder / "model")
    replica.merge(outer)
    return folder / "model"


def _compare_outputs(trained: torch.nn.Module, delivered: torch.nn.Module) -> float | None:
    """Return the largest difference of the outputs for the same made-up inputs, relative to the largest output."""
    inputs = _make_inputs(trained)
    torch.manual_seed(0)  # some models draw random numbers
    if inputs is None:
        return None
    with torch.inference_mode():
        try:
            one = _tensors(trained.eval()(**inputs))
        except Exception as error:  # noqa: BLE001 – whatever a model raises that takes other inputs
            logger.info("outputs are not compared: %s: %s", type(error).__name__, error)
            return None
        torch.manual_seed(0)
        other = _tensors(delivered(**inputs))
    largest = max((float(tensor.abs().max()) for tensor in one), default=0.0)
    return max((float((a - b).abs().max()) for a, b in zip(one, other, strict=True)), default=0.0) / (largest or 1.0)


def _tensors(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output.float()] if output.is_floating_point() and output.numel() else []
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    return [tensor for value in values for tensor in _tensors(value)]


def _make_inputs(module: Any) -> dict[str, torch.Tensor] | None:
    """Return inputs for a model of text, images or sound; None for others."""
    config: Any = getattr(module, "config", None)
    name = getattr(module, "main_input_name", None)
    chance = torch.Generator().manual_seed(0)
    dtype = next(module.parameters()).dtype
    if name == "pixel_values":
        size = getattr(config, "image_size", None) or 32
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = getattr(config, "num_channels", 3)
        return {name: torch.rand(_ROWS, channels, height, width, generator=chance).to(dtype)}
    if name == "input_values" and not hasattr(config, "num_mel_bins"):
        return {name: torch.rand(_ROWS, _SOUND, generator=chance).to(dtype)}
    if name != "input_ids" or (vocabulary := getattr(config.get_text_config(), "vocab_size", None)) is None:
        return None
    tokens = torch.randint(vocabulary // 2, vocabulary, (_ROWS, _TOKENS), generator=chance)
    inputs = {name: tokens, "attention_mask": torch.ones_like(tokens)}
    return inputs | ({"decoder_input_ids": tokens} if config.is_encoder_decoder else {})
