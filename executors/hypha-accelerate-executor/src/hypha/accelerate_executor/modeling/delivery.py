"""Checks that a model loads with the weights that were trained, written as the scheduler writes it.

Run by the training loop after the last round and by ``check-model``.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Collection
from pathlib import Path
from tempfile import TemporaryDirectory

from hypha.accelerate_executor.diloco.replica import Replica
from hypha.accelerate_executor.errors import DeliveryError, ModelError
from hypha.accelerate_executor.modeling.hf import load_stored_model
from hypha_proto.global_model import write_shards
from hypha_proto.safetensors_io import TensorFile

logger = logging.getLogger(__name__)


def check_delivery(task: str, model_dir: Path, replica: Replica, allowed: Collection[str]) -> None:
    """Write the model with a replica's global weights, load it with the library, and compare it with them.

    Needs room for the model in main memory, and for twice the model beside the directory of the start model.

    Args:
        task: wire name of the task.
        model_dir: the start model.
        replica: weights to compare with.
        allowed: modules whose classes models of task `torch` may use.

    Raises:
        DeliveryError: the model cannot be loaded, or has other weights.
        TensorFileError, OSError: a file cannot be written or read.
    """
    with TemporaryDirectory(dir=model_dir.parent) as made:
        folder, weights = Path(made, "model"), Path(made, "weights.safetensors")
        copy_companions(model_dir, folder)
        replica.write_weights(weights)
        with TensorFile(weights) as file:
            write_shards(model_dir, file, folder)
        try:
            delivered = load_stored_model(task, folder, allowed=allowed)
        except ModelError as error:
            raise DeliveryError(f"the delivered model cannot be loaded: {error}") from error
        differing = replica.find_differing(delivered)
    if differing:
        raise DeliveryError(
            f"the delivered model does not load with the trained weights: {len(differing)} of {len(replica.members)} "
            f"tensors differ, first {differing[0]!r}; the job's outer-state has the trained ones"
        )
    logger.info("the delivered model loads with the trained weights: %d tensors compared", len(replica.members))


def copy_companions(model_dir: Path, folder: Path) -> None:
    """Copy the files of a model without its weights."""
    shutil.copytree(model_dir, folder, ignore=shutil.ignore_patterns("*.safetensors"))
