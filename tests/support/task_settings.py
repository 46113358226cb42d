"""Settings of tasks that train or aggregate, with defaults for what a test does not care about."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypha_proto.ids import PeerId
from hypha_proto.job_spec import (
    Adam,
    AggregateConfig,
    All,
    HuggingFaceReference,
    Model,
    Nesterov,
    PeersReference,
    SchedulerReference,
    TrainConfig,
)


def all_of(*peers: PeerId) -> PeersReference:
    """Return a reference to all of these peers."""
    return PeersReference(peers=peers, strategy=All())


def training(scheduler: PeerId, server: PeerId | None = None, **changes: Any) -> TrainConfig:
    """Return settings of training on the dataset ``digits``; `changes` replace some of them.

    Args:
        scheduler: assigns slices.
        server: gets updates and sends results; by default the scheduler.
    """
    model = HuggingFaceReference(repository="org/model", filenames=("config.json",), token="hf_secret")
    exchange = all_of(server or scheduler)
    fields: dict[str, Any] = {
        "model": Model(task="image-classification", artifact=model, input_names=("pixel_values",)),
        "data": SchedulerReference(peer=scheduler, dataset="digits"),
        "updates": exchange,
        "results": exchange,
        "optimizer": Adam(learning_rate=0.001),
        "batch_size": 8,
    }
    return TrainConfig(**(fields | changes))


def aggregation(senders: Iterable[PeerId], receivers: Iterable[PeerId], **changes: Any) -> AggregateConfig:
    """Return settings of a parameter server of the first term; `changes` replace some of them."""
    fields: dict[str, Any] = {"optimizer": Nesterov(learning_rate=0.7, momentum=0.9), "term": 1}
    return AggregateConfig(updates=all_of(*senders), results=all_of(*receivers), **(fields | changes))
