"""Builds what one process trains with from the model's files; the same in the leader and its followers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from hypha.accelerate_executor.data.model_inputs import ModelInputs, value_limits
from hypha.accelerate_executor.data.preprocess import load_preprocessor, load_tokenizer, preprocessed_columns
from hypha.accelerate_executor.data.row_tokenizer import RowTokenizer
from hypha.accelerate_executor.data.samples import Arrays
from hypha.accelerate_executor.diloco.replica import Replica
from hypha.accelerate_executor.diloco.round_seed import round_seed, seed_generators
from hypha.accelerate_executor.distributed.accelerator import Device
from hypha.accelerate_executor.distributed.process_group import ProcessGroup
from hypha.accelerate_executor.distributed.state_dict import ShardedWeights, Weights, WholeWeights
from hypha.accelerate_executor.environment import read_memory
from hypha.accelerate_executor.errors import JobError
from hypha.accelerate_executor.modeling.delivery import check_delivery
from hypha.accelerate_executor.modeling.evaluation import Subject
from hypha.accelerate_executor.modeling.hf import load_model
from hypha.accelerate_executor.options import ModelFiles, OwnerOptions
from hypha.accelerate_executor.train.inner_optimizer import InnerOptimizer
from hypha.accelerate_executor.train.micro_batch_size import MicroBatchSizer
from hypha.accelerate_executor.train.trainer import Trainer
from hypha_proto.job_spec import TrainConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Setup:
    """Model, optimizer and weights access of one process."""

    trainer: Trainer
    replica: Replica
    weights: Weights
    group: ProcessGroup
    subject: Subject | None
    """The model, to evaluate it; None if the job does not ask for it or this process cannot compute the model alone."""
    begin_round: Callable[[int], None]
    """Seeds the random generators for a round, by its number from 1, and sets the learning-rate schedule to it."""
    reset: Callable[[], None]
    """Discards what is kept from round to round beside the weights: the optimizer's state, and changes of buffers."""
    module: torch.nn.Module
    """The model on its device."""
    optimizer: InnerOptimizer
    check_delivery: Callable[[], None]
    """Checks that the model with the global weights loads as the job delivers it; see `modeling.delivery`."""
    sizer: MicroBatchSizer | None
    """Finds how many samples to compute at once; None if nothing says how much memory there is, and
    in one of several processes, which compute in lockstep."""


def build_setup(
    config: TrainConfig, options: OwnerOptions, files: ModelFiles, device: Device, group: ProcessGroup
) -> Setup:
    """Load the model, place it on the device and create its optimizer; the leader also loads the preprocessor.

    Raises:
        ExecutorError: the model cannot be loaded, or the job is not supported.
    """
    if options.device_map is not None and group.size > 1:
        raise JobError("--device-map distributes one model over all devices: launch with --num_processes 1")
    torch.manual_seed(config.seed or 0)
    model = load_model(config.model.task, files.model, allowed=options.modules, device_map=options.device_map)
    processed = config.preprocessor is not None
    inputs = ModelInputs(config.model.task, config.model.input_names, model, preprocessed=processed)
    preprocess = _preprocessor(config, files.preprocessor, model) if group.leads else None
    before = (
        Replica(model, files.model, group.leads) if device.is_sharded else None
    )  # afterwards no process has whole tensors
    placed, optimizer = device.prepare(
        model,
        lambda parameters: InnerOptimizer(parameters, config.optimizer, config.scheduler, config.round_steps),
    )
    replica = before or Replica(model, files.model, group.leads)
    weights: Weights = ShardedWeights(placed, replica.members) if before else WholeWeights(replica.members, group)
    replica.attach_weights(weights)
    logger.info(
        "training %s: %d tensors, on %s%s",
        type(model).__name__,
        len(replica.names),
        device.torch_device,
        f", {group.size} processes" if group.size > 1 else "",
    )
    limits = value_limits(config.model.task, model)
    trainer = Trainer(placed, inputs, optimizer, device, preprocess, limits, config.micro_batch)
    subject = None
    if config.evaluation is not None and group.leads and not device.is_sharded:
        subject = Subject(
            model,
            inputs,
            device.torch_device,
            _preprocessor(config, files.preprocessor, model),
            frozenset(preprocessed_columns(config)),
            may_copy=options.device_map is None,
        )
    begin_round = partial(_begin_round, config, optimizer)
    buffers = {name: buffer.detach().clone() for name, buffer in placed.named_buffers()}
    reset = partial(_reset, placed, buffers, optimizer)
    memory, kind = read_memory(), device.torch_device.type
    sizer = None
    if group.size == 1 and (kind == "cuda" or (kind == "cpu" and memory is not None)):
        limit, copies = None if kind == "cuda" else memory, int(subject is not None)
        sizer = MicroBatchSizer(trainer, placed, optimizer, device, memory=limit, weight_copies=copies)
    deliver = partial(check_delivery, config.model.task, files.model, replica, options.modules)
    return Setup(trainer, replica, weights, group, subject, begin_round, reset, placed, optimizer, deliver, sizer)


def _reset(module: torch.nn.Module, buffers: Mapping[str, torch.Tensor], optimizer: InnerOptimizer) -> None:
    optimizer.reset()
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])


def _begin_round(config: TrainConfig, optimizer: InnerOptimizer, number: int) -> None:
    seed_generators(round_seed(config.seed or 0, config.member, number))
    optimizer.begin_round(number)


def _preprocessor(
    config: TrainConfig, folder: Path | None, model: torch.nn.Module
) -> Callable[[Arrays], Arrays] | None:
    if config.preprocessor is None or folder is None:
        return None
    if config.rows is not None:
        return RowTokenizer(load_tokenizer(folder), config.rows, model)
    return load_preprocessor(config.preprocessor.task, folder, preprocessed_columns(config), model)
