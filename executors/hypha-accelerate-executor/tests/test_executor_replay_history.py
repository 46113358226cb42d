"""Histories of jobs whose numbers are known: momentum, weights 4:1:2:1, a member missing, a late joiner.

All numbers are multiples of powers of two, so that float32 holds them exactly, and they can be checked with a pencil.
The members' updates are given; what is computed is the mean, the outer step, the momentum and the weights.
"""

from __future__ import annotations

import math
import shutil
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from msgspec.structs import replace

from hypha.accelerate_executor.replay.computation import NotProvableError, RoundComputation, RoundFindings
from hypha.accelerate_executor.replay.verdict import conclude, describe_round
from hypha_proto.contributions import OPTIMIZER_KEPT, Contribution, SampleRange
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import Adam, All, Model, Nesterov, PeersReference, TrainConfig, UriReference
from hypha_proto.replay_plan import FORMAT, RecordedRound, RecordedUpdate, ReplayPlan, Run
from hypha_proto.safetensors_io import TensorFile
from hypha_proto.update_file import UpdateMetadata, write_update
from hypha_proto.weights_digest import digest_weights

PEERS = tuple(
    PeerId.parse(text)
    for text in (
        "12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5",
        "12D3KooWJvyP3VJYymTqG7eH4PM5rN4T2agk5cdNCfNymAqwqcvZ",
        "12D3KooWHHzSeKaY8xuZVzkLbKFfvNgPPeKhFBGrMbNzbm5akpqu",
        "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp",
    )
)
START = {"w": np.array([1.0, -2.0], "<f4"), "mean": np.array([0.5], "<f4"), "count": np.array(3, "<i8")}
TRAIN = TrainConfig(
    model=Model(task="torch", artifact=UriReference(value="file:///model"), input_names=()),
    data=UriReference(value="file:///data"),
    updates=PeersReference(peers=(), strategy=All()),
    results=PeersReference(peers=(), strategy=All()),
    optimizer=Adam(learning_rate=0.1),
    batch_size=1,
)

Values = tuple[tuple[float, float], float, int]
"""Change of the parameter, of the running mean and of the count."""


def write_values(path: Path, values: Values, number: int, samples: int | None) -> Path:
    arrays = {
        "w": np.array(values[0], "f4"),
        "mean": np.array([values[1]], "f4"),
        "count": np.array(values[2], "f4"),
    }
    statistics, integers = frozenset({"mean", "count"}), frozenset({"count"} if samples is not None else ())
    about = UpdateMetadata(number, samples, statistics, integers)
    write_update(path, {name: array.shape for name, array in arrays.items()}, arrays.items(), about)
    return path


def digest(path: Path) -> str:
    return f"blake3:{blake3(path.read_bytes()).hexdigest()}"


class Job:
    """A record that is written by hand, and a trainee that returns the given updates."""

    def __init__(self, folder: Path, outer: Nesterov) -> None:
        self.folder, self.outer = folder, outer
        self.weights = {name: array.copy() for name, array in START.items()}
        self.told = {name: array.copy() for name, array in START.items()}
        self.given: dict[tuple[int, PeerId], tuple[Values, int]] = {}
        self.rounds: list[RecordedRound] = []

    def round(
        self,
        members: Sequence[tuple[int, int, Values]],
        outer: Values,
        *,
        unused: Iterable[int] = (),
        keep: bool = False,
    ) -> None:
        """Add a round: number, samples and update of each member, and the outer update that must follow."""
        number = len(self.rounds) + 1
        before = digest_weights(self.told.items())
        recorded = tuple(self._recorded(number, before, *member) for member in members)
        path = write_values(self.folder / f"kept-{number}.safetensors", outer, number, None)
        self.told["w"] += np.array(outer[0], "f4")
        self.told["mean"] += np.array([outer[1]], "f4")
        self.told["count"] += np.int64(outer[2])
        late = tuple(self._recorded(number, before, member, 1, ((9.0, 9.0), 9.0, 9)) for member in unused)
        self.rounds.append(
            RecordedRound(
                round=number, run=0, members=recorded, unused=late, update=digest(path), weights_before=before,
                weights=digest_weights(self.told.items()), kept=str(path) if keep else None,
            )
        )  # fmt: skip

    def _recorded(self, number: int, before: str, member: int, samples: int, values: Values) -> RecordedUpdate:
        peer = PEERS[member]
        self.given[number, peer] = values, samples
        path = write_values(self.folder / "stated", values, number, samples)
        stated = Contribution(
            round=number, weights=before, ranges=(SampleRange(epoch=0, slice=member, first=0, end=samples),),
            batches=samples, batch_size=1, seed=7, optimizer=OPTIMIZER_KEPT, update=digest(path),
        )  # fmt: skip
        return RecordedUpdate(peer=peer, samples=samples, update=stated.update, contribution=stated)

    def replay(self) -> list[RoundFindings]:
        plan = ReplayPlan(
            format=FORMAT, job_id=uuid.UUID(int=1), model="", slices=(), runs=(Run(train=TRAIN, outer=self.outer),),
            rounds=tuple(self.rounds), tolerance=0.01,
        )  # fmt: skip
        scratch = self.folder / "scratch"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        return list(RoundComputation(plan, self, scratch).rounds())

    def configure(self, config: TrainConfig) -> None:
        assert config == TRAIN

    def weights_digest(self) -> str:
        return digest_weights(self.weights.items())

    def train(self, peer: PeerId, number: int, stated: Contribution, path: Path) -> None:
        values, samples = self.given[number, peer]
        write_values(path, values, number, samples)

    def forget(self, peer: PeerId) -> None:
        """Nothing is kept."""

    def merge(self, update: Path) -> None:
        with TensorFile(update) as file:
            for name, array in self.weights.items():
                array += file.tensor(name).astype(array.dtype)


@pytest.fixture
def nesterov(tmp_path: Path) -> Job:
    return Job(tmp_path, Nesterov(learning_rate=0.5, momentum=0.5))


def assert_equal(found: Sequence[RoundFindings], job: Job, weights: Mapping[str, Sequence[float]]) -> None:
    assert [findings.is_equal for findings in found] == [True] * len(job.rounds), [
        line for findings in found for line in describe_round(findings)
    ]
    assert {name: array.tolist() for name, array in job.weights.items()} == weights


def test_momentum_over_rounds(nesterov: Job) -> None:
    # m = 0.5 m + d and u = 0.5 (d + 0.5 m): d = 4, 0, -8 gives m = 4, 2, -7 and u = 3, 0.5, -5.75
    for delta, outer in ((4.0, 3.0), (0.0, 0.5), (-8.0, -5.75)):
        nesterov.round([(0, 2, ((delta, 2 * delta), 1.0, 5))], ((outer, 2 * outer), 1.0, 5))
    assert_equal(nesterov.replay(), nesterov, {"w": [-1.25, -6.5], "mean": [3.5], "count": 18})


def test_classical_momentum_over_rounds(tmp_path: Path) -> None:
    job = Job(tmp_path, Nesterov(learning_rate=0.25, momentum=0.5, nesterov=False))
    for delta, outer in ((8.0, 2.0), (8.0, 3.0), (0.0, 1.5)):  # m = 8, 12, 6
        job.round([(0, 2, ((delta, 0.0), 0.0, 1))], ((outer, 0.0), 0.0, 1))
    assert_equal(job.replay(), job, {"w": [7.5, -2.0], "mean": [0.5], "count": 6})


def test_members_count_as_their_samples_and_counts_are_the_first_ones(tmp_path: Path) -> None:
    job = Job(tmp_path, Nesterov(learning_rate=1.0, momentum=0.0))
    updates = [((8.0, 0.0), 1.0, 40), ((0.0, 8.0), 2.0, 10), ((-4.0, 4.0), 0.0, 20), ((8.0, 8.0), 4.0, 11)]
    members = [
        (number, samples, update) for number, (samples, update) in enumerate(zip((4, 1, 2, 1), updates, strict=True))
    ]
    # (4 * 8 + 0 - 2 * 4 + 8) / 8, (0 + 8 + 2 * 4 + 8) / 8, and of the means (4 * 1 + 2 + 0 + 4) / 8
    job.round(members, ((4.0, 3.0), 1.25, 40))
    assert_equal(job.replay(), job, {"w": [5.0, 1.0], "mean": [1.75], "count": 43})


def test_a_missing_member_leaves_the_mean_to_the_others(nesterov: Job) -> None:
    both = [(0, 3, ((4.0, 0.0), 0.0, 1)), (1, 1, ((0.0, 8.0), 0.0, 1))]
    nesterov.round(both, ((2.25, 1.5), 0.0, 1))  # d = (3, 2) = m
    nesterov.round([(1, 1, ((1.5, 0.0), 0.0, 1))], ((1.5, 0.25), 0.0, 1), unused=[0])  # m = (3, 1)
    nesterov.round(both, ((3.375 - 0.75, 1.75 - 0.125), 0.0, 1))  # m = (4.5, 2.5), u = (d + m / 2) / 2
    assert_equal(nesterov.replay(), nesterov, {"w": [7.375, 1.375], "mean": [0.5], "count": 6})


def test_a_late_joiner_counts_from_its_first_round(nesterov: Job) -> None:
    first = (0, 1, ((4.0, 0.0), 0.0, 1))
    nesterov.round([first], ((3.0, 0.0), 0.0, 1))  # d = m = 4
    nesterov.round([first, (3, 3, ((0.0, 8.0), 4.0, 2))], ((1.25, 4.5), 3.0, 1))  # d = (1, 6), m = (3, 6)
    assert_equal(nesterov.replay(), nesterov, {"w": [5.25, 2.5], "mean": [3.5], "count": 5})


def test_a_changed_weight_is_found(nesterov: Job) -> None:
    members = [(0, 3, ((4.0, 0.0), 0.0, 1)), (1, 1, ((0.0, 8.0), 0.0, 1))]
    nesterov.round(members, ((2.25, 1.5), 0.0, 1), keep=True)
    nesterov.round(members, ((2.625, 1.75), 0.0, 1), keep=True)
    [one, other] = nesterov.rounds[0].members
    nesterov.rounds[0] = replace(nesterov.rounds[0], members=(replace(one, samples=2), other))
    first, second = nesterov.replay()
    assert "the outer update is" in first.differing[0]
    assert (first.reproduced, first.difference) == (2, 0.5)
    assert second.is_equal
    proven, verdict = conclude([first, second], 2)
    assert not proven
    assert "see round 1" in verdict


def test_differences_are_rounding_only_if_nothing_is_equal_to_the_bit(nesterov: Job) -> None:
    nesterov.round([(0, 1, ((4.0, 0.0), 0.0, 1))], ((3.0, 0.0), 0.0, 1), keep=True)
    nesterov.given[1, PEERS[0]] = ((4.001, 0.0), 0.0, 1), 1
    found = nesterov.replay()
    assert (found[0].reproduced, found[0].tolerance) == (0, pytest.approx(0.03))
    assert found[0].difference == pytest.approx(0.00075, rel=1e-3)
    proven, verdict = conclude(found, 1)
    assert proven
    assert verdict.startswith("proven within the tolerance")
    assert "largest difference of the outer update 0.00075, tolerance 0.03" in next(describe_round(found[0]))
    proven, verdict = conclude([*found, RoundFindings(2, updates=1, reproduced=1, is_exact=True)], 2)
    assert not proven
    assert "not rounding" in verdict


def test_what_cannot_be_computed_is_not_proven(nesterov: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    nesterov.round([(0, 1, ((4.0, 0.0), 0.0, 1))], ((3.0, 0.0), 0.0, 1))

    def fail(*_: object) -> None:
        raise NotProvableError("it kept its optimizer state")

    monkeypatch.setattr(nesterov, "train", fail)
    [found] = nesterov.replay()
    assert "not provable" in next(describe_round(found))
    assert not conclude([found], 1)[0]


def test_zeros_do_not_show_that_a_machine_computes_to_the_bit(nesterov: Job) -> None:
    nesterov.round([(0, 1, ((0.0, 0.0), 0.0, 0))], ((0.0, 0.0), 0.0, 0), keep=True)
    nesterov.round([(0, 1, ((4.0, 0.0), 0.0, 1))], ((3.0, 0.0), 0.0, 1), keep=True)
    nesterov.given[2, PEERS[0]] = ((4.001, 0.0), 0.0, 1), 1
    found = nesterov.replay()
    assert [findings.is_equal for findings in found] == [True, False]
    assert conclude(found, 2) == (
        True,
        "proven within the tolerance: 2 rounds, 1 equal to the bit; this machine, its "
        "libraries or its number of threads compute otherwise than the workers",
    )


def test_the_tolerance_is_that_of_parameters_and_statistics_alone_and_counts_have_none(nesterov: Job) -> None:
    nesterov.round([(0, 1, ((4.0, 0.0), 100.0, 1000))], ((3.0, 0.0), 100.0, 1000), keep=True)
    for given, difference, tolerance in (
        (((4.4, 0.0), 100.0, 1000), 0.3, 0.03),
        (((4.0, 0.0), 101.5, 1000), 1.5, 1.0),
        (((4.0, 0.0), 100.0, 1001), math.inf, 0.0),
    ):
        nesterov.given[1, PEERS[0]] = given, 1
        [found] = nesterov.replay()
        assert (found.difference, found.tolerance) == (pytest.approx(difference), pytest.approx(tolerance))
        assert not conclude([found], 1)[0]
        nesterov.weights = {name: array.copy() for name, array in START.items()}
