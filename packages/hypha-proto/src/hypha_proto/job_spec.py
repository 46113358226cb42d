"""What an executor is asked to do. The same value goes to a worker as CBOR and to its executor process as JSON.

Optional fields that are left out when none are ours: peers that do not know them skip them.
"""

from __future__ import annotations

import uuid
from typing import Annotated, Final, get_args

from hypha_proto.ids import PeerId
from hypha_proto.wire_schema import OMIT, U32, U64, Message

TASKS: Final = (
    "auto", "causal-lm", "image-classification", "masked-lm", "seq2-seq-lm", "sequence-classification",
    "token-classification", "question-answering", "multiple-choice", "next-sentence-prediction", "masked-generation",
    "image-segmentation", "semantic-segmentation", "instance-segmentation", "universal-segmentation",
    "object-detection", "zero-shot-object-detection", "zero-shot-image-classification", "depth-estimation",
    "keypoint-detection", "keypoint-matching", "mask-generation", "masked-image-modeling", "image-to-image",
    "image-text-to-text", "video-classification", "audio-classification", "audio-frame-classification",
    "audio-tokenization", "audio-x-vector", "ctc", "speech-seq2-seq", "text-to-spectrogram", "text-to-waveform",
    "document-question-answering", "table-question-answering", "visual-question-answering", "vision2-seq",
    "text-encoding", "time-series-prediction", "backbone", "pre-training", "torch",
)  # fmt: skip
"""Names of model tasks, kebab-case; each asks for the Auto class of its name (`torch` for a plain module)."""

PREPROCESSOR_TASKS: Final = ("auto", "tokenizer", "feature", "image", "video")


class All(Message, frozen=True, tag="All"):
    """Every peer of a reference."""


class Random(Message, frozen=True, tag="Random"):
    """One peer, chosen at random."""


class One(Message, frozen=True, tag="One"):
    """Any one peer."""


Strategy = All | Random | One


class SliceAddress(Message, frozen=True):
    """One slice of a dataset."""

    dataset: str
    index: U64


class UriReference(Message, frozen=True, tag="uri"):
    """Something at a URI: ``https://…``, ``file:///…``."""

    value: str


class HuggingFaceReference(Message, frozen=True, kw_only=True, tag="huggingface"):
    """Files of a repository on a Hugging Face hub."""

    repository: str
    revision: str | None = None
    filenames: tuple[str, ...]
    token: str | None = None


class PeersReference(Message, frozen=True, tag="peers"):
    """Peers to send to, to receive from, or (with `resource`) to pull from."""

    peers: tuple[PeerId, ...]
    strategy: Strategy
    resource: SliceAddress | None = None
    filenames: Annotated[tuple[str, ...] | None, OMIT] = None
    """Names of the files at `resource.index`, `resource.index + 1`, …: a model that a scheduler serves."""


class SchedulerReference(Message, frozen=True, tag="scheduler"):
    """Slices of a dataset as the scheduler hands them out."""

    peer: PeerId
    dataset: str


Reference = UriReference | HuggingFaceReference | PeersReference | SchedulerReference


class Model(Message, frozen=True, rename="kebab"):
    """The model to train and the tensors of a slice it is given, in order."""

    task: str
    artifact: Reference
    input_names: tuple[str, ...]


class Preprocessor(Message, frozen=True, rename="kebab"):
    """What is applied to each batch before the model."""

    task: str
    artifact: Reference
    input_names: tuple[str, ...]


class Adam(Message, frozen=True, rename="kebab"):
    """The inner optimiser, AdamW."""

    learning_rate: float
    betas: tuple[float, float] | None = None
    epsilon: float | None = None
    weight_decay: Annotated[float | None, OMIT] = None
    max_grad_norm: Annotated[float | None, OMIT] = None


class Nesterov(Message, frozen=True, rename="kebab"):
    """The outer optimiser."""

    learning_rate: float
    momentum: float
    nesterov: Annotated[bool | None, OMIT] = None
    """False for classical momentum; none means true."""


class CosineWithWarmup(Message, frozen=True, tag="cosine-with-warmup"):
    """Linear warmup, then half a cosine to zero; counted in steps of the whole job."""

    warmup_steps: U64
    training_steps: U64


class LinearWithWarmup(Message, frozen=True, tag="linear-with-warmup"):
    """Linear warmup, then linear to zero."""

    warmup_steps: U64
    training_steps: U64


class WarmupStableDecay(Message, frozen=True, tag="wsd"):
    """Linear warmup, constant, decay."""

    warmup_steps: U64
    decay_steps: U64
    training_steps: Annotated[U64 | None, OMIT] = None
    """Steps of the whole job, of which the last `decay_steps` decay."""


LearningRateSchedule = CosineWithWarmup | LinearWithWarmup | WarmupStableDecay


class Evaluation(Message, frozen=True):
    """Samples that nobody trains on, by which a worker measures the model after outer updates."""

    data: Reference
    """This worker's share of them."""
    every: U32
    """After each so many rounds."""


class TrainConfig(Message, frozen=True):
    """A training worker's part of a DiLoCo job."""

    model: Model
    data: Reference
    updates: Reference
    """Where pseudo-gradients go."""
    results: Reference
    """Who sends outer updates."""
    optimizer: Adam
    batch_size: U32
    preprocessor: Annotated[Preprocessor | None, OMIT] = None
    scheduler: Annotated[LearningRateSchedule | None, OMIT] = None
    seed: Annotated[U64 | None, OMIT] = None
    """Order of the samples within a slice."""
    first_round: Annotated[U32 | None, OMIT] = None
    """Number of the round that this worker starts in; none means 1."""
    first_step: Annotated[U64 | None, OMIT] = None
    """Steps that the job's schedule of the learning rate has behind it when this worker starts; none means 0."""
    evaluation: Annotated[Evaluation | None, OMIT] = None


class AggregateConfig(Message, frozen=True):
    """The parameter server's part of a DiLoCo job."""

    updates: Reference
    """Who sends pseudo-gradients."""
    results: Reference
    """Who gets outer updates."""
    optimizer: Nesterov
    members: Annotated[bool | None, OMIT] = None
    """True when the scheduler names each round's members over ``/hypha-aggregate``."""


class Descriptor(Message, frozen=True):
    """Name of an executor as workers configure it."""

    name: str


class TrainJob(Message, frozen=True, tag="train", tag_field="class"):
    """Run a training executor."""

    descriptor: Descriptor
    config: TrainConfig


class AggregateJob(Message, frozen=True, tag="aggregate", tag_field="class"):
    """Run a parameter server."""

    descriptor: Descriptor
    config: AggregateConfig


class JobSpec(Message, frozen=True):
    """One dispatch of a job. All dispatches of a job carry the same `job_id`."""

    job_id: uuid.UUID
    executor: TrainJob | AggregateJob


def executor_class(spec: JobSpec) -> str:
    """``train`` or ``aggregate``."""
    return str(type(spec.executor).__struct_config__.tag)


REFERENCE_KINDS: Final = tuple(str(kind.__struct_config__.tag) for kind in get_args(Reference))
