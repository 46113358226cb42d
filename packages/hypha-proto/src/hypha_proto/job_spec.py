"""Settings of tasks that train or aggregate: model, data, peers and optimizers.

A scheduler sends them to a worker as CBOR (`tasks.TaskSpec`), and the worker passes those of training to the executor
process as JSON. Fields marked `OMIT` are left out when None, and peers that do not know them skip them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

from hypha_proto.ids import PeerId
from hypha_proto.wire_schema import OMIT, U32, U64, Amount, Message

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
"""Model tasks in kebab-case; each selects the transformers Auto class of that name (`torch`: a plain module)."""

PREPROCESSOR_INPUTS: Final[Mapping[str, tuple[str, ...]]] = {
    "auto": (),
    "tokenizer": ("text",),
    "feature": ("audio",),
    "image": ("image",),
    "video": ("video",),
}
"""Tensors of a slice that each kind of preprocessor takes if the job names none."""
PREPROCESSOR_TASKS: Final = tuple(PREPROCESSOR_INPUTS)
"""Kinds of preprocessors."""


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
    """Resource at a URI such as ``https://…`` or ``file:///…``."""

    value: str


class HuggingFaceReference(Message, frozen=True, kw_only=True, tag="huggingface"):
    """Files of a repository on a Hugging Face hub."""

    repository: str
    revision: str | None = None
    filenames: tuple[str, ...]
    token: str | None = None


class PeersReference(Message, frozen=True, tag="peers"):
    """Peers to send to, to receive from or, with `resource`, to pull from."""

    peers: tuple[PeerId, ...]
    strategy: Strategy
    resource: SliceAddress | None = None
    filenames: Annotated[tuple[str, ...] | None, OMIT] = None
    """File names at `resource.index`, `resource.index + 1`, …; used for a model that a scheduler serves."""


class SchedulerReference(Message, frozen=True, tag="scheduler"):
    """Slices of a dataset, assigned one by one by the scheduler."""

    peer: PeerId
    dataset: str


Reference = UriReference | HuggingFaceReference | PeersReference | SchedulerReference


class Model(Message, frozen=True, rename="kebab"):
    """Model to train, and the tensors of a slice that are its inputs, in order."""

    task: str
    artifact: Reference
    input_names: tuple[str, ...]


class Preprocessor(Message, frozen=True, rename="kebab"):
    """Preprocessor applied to each batch before the model."""

    task: str
    artifact: Reference
    input_names: tuple[str, ...]


class TextRows(Message, frozen=True):
    """Templates of the text of JSON lines: names of columns in braces, and ``{{`` and ``}}`` for braces."""

    completion: str
    """Text whose tokens are learnt."""
    prompt: Annotated[str | None, OMIT] = None
    """Text before it, whose tokens are not learnt."""
    chat_template: bool = True
    """Whether the tokenizer's chat template, if it has one, is applied to the prompt."""


class Adam(Message, frozen=True, rename="kebab"):
    """Inner optimizer: AdamW. Fields that are None have the executor's defaults."""

    learning_rate: float
    betas: tuple[float, float] | None = None
    epsilon: float | None = None
    weight_decay: Annotated[float | None, OMIT] = None
    max_grad_norm: Annotated[float | None, OMIT] = None


class Nesterov(Message, frozen=True, rename="kebab"):
    """Outer optimizer: SGD with Nesterov momentum."""

    learning_rate: float
    momentum: float
    nesterov: Annotated[bool | None, OMIT] = None
    """False for classical momentum; None means true."""

    @property
    def is_classical(self) -> bool:
        """Whether its momentum is not Nesterov's."""
        return self.nesterov is False


class CosineWithWarmup(Message, frozen=True, tag="cosine-with-warmup"):
    """Learning-rate schedule: linear warmup, then half a cosine to zero. Counted in inner steps of the whole job."""

    warmup_steps: U64
    training_steps: U64


class LinearWithWarmup(Message, frozen=True, tag="linear-with-warmup"):
    """Learning-rate schedule: linear warmup, then linear decay to zero."""

    warmup_steps: U64
    training_steps: U64


class WarmupStableDecay(Message, frozen=True, tag="wsd"):
    """Learning-rate schedule: linear warmup, constant, decay."""

    warmup_steps: U64
    decay_steps: U64
    training_steps: Annotated[U64 | None, OMIT] = None
    """Inner steps of the whole job; the rate decays in the last `decay_steps` of them."""


LearningRateSchedule = CosineWithWarmup | LinearWithWarmup | WarmupStableDecay


class Evaluation(Message, frozen=True):
    """Held-out samples on which a worker evaluates the model after outer updates."""

    data: Reference
    """This worker's share of the samples."""
    every: U32
    """Number of rounds between two evaluations."""


class TrainConfig(Message, frozen=True):
    """Configuration of a training worker in a DiLoCo job (arXiv:2311.08105)."""

    model: Model
    data: Reference
    """Source of the training slices."""
    updates: Reference
    """Destination of the worker's pseudo-gradients."""
    results: Reference
    """Senders of outer updates. Without peers nobody sends any, and the job ends with its first pseudo-gradient."""
    optimizer: Adam
    batch_size: U32
    """Samples per inner step."""
    preprocessor: Annotated[Preprocessor | None, OMIT] = None
    scheduler: Annotated[LearningRateSchedule | None, OMIT] = None
    seed: Annotated[U64 | None, OMIT] = None
    """Seed of the sample order within a slice, and with `member` of the random layers in each round."""
    member: Annotated[U32 | None, OMIT] = None
    """Number of this worker in the job, from 0; no two workers of a job have the same."""
    round_steps: Annotated[Amount | None, OMIT] = None
    """Steps of the learning-rate schedule in a round; None means that a worker counts its own steps, in all rounds."""
    first_round: Annotated[U32 | None, OMIT] = None
    """Number of the round in which this worker starts; None means 1."""
    evaluation: Annotated[Evaluation | None, OMIT] = None
    term: Annotated[U32 | None, OMIT] = None
    """Term of the parameter server. With it the worker states each update to the scheduler, and gives the executor an
    outer update only when the scheduler has committed it (`hypha_proto.contributions`)."""
    weights: Annotated[Reference | None, OMIT] = None
    """The newest global weights, one safetensors file with the exchanged tensors in float32 or int64. A worker loads
    them before a `first_round` above 1, and when its own have another digest than the scheduler's."""
    join: Annotated[bool | None, OMIT] = None
    """Whether the executor asks before its first batch, and whenever it is told to rejoin, in which round it begins
    (`job_membership.JoinRound`). Executors that do not know this key begin with `first_round`."""
    micro_batch: Annotated[U32 | None, OMIT] = None
    """Maximum number of samples that are computed at once, because more exhausted the memory; None means no limit."""
    rows: Annotated[TextRows | None, OMIT] = None
    """How the tokenizer of `preprocessor` reads slices of JSON lines; None means that slices hold tensors."""


class AggregateConfig(Message, frozen=True):
    """Configuration of the parameter server in a DiLoCo job."""

    updates: Reference
    """Senders of pseudo-gradients."""
    results: Reference
    """Receivers of outer updates."""
    optimizer: Nesterov
    term: U32
    """Number of this parameter server among all that the job has had, from 1; stated in its pushes."""
    momentum: Annotated[Reference | None, OMIT] = None
    """The outer momentum to begin with, one safetensors file in float32; None means none."""
