"""The round collector: which updates belong to a round, and when it is complete; and the outer momentum."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from numpy.typing import NDArray

from hypha_proto.commands import SetMembers
from hypha_proto.global_model import MOMENTUM, GlobalModel
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import Nesterov
from hypha_proto.outer_step import outer_step
from hypha_proto.round_membership import Member
from hypha_proto.safetensors_io import TensorFile, TensorFileWriter, TensorInfo
from hypha_proto.update_file import UpdateMetadata, write_update
from hypha_worker.executors.parameter_server.round_collector import EmptyRoundError, RoundCollector, UpdateRefusedError

A, B, C, OUTSIDER = (PeerId.from_public_key(bytes([n]) * 32) for n in range(4))


def members(number: int, samples: dict[PeerId, int], deadline_ms: int = 1000) -> SetMembers:
    listed = tuple(Member(peer=peer, samples=count) for peer, count in samples.items())
    return SetMembers(round=number, members=listed, deadline_ms=deadline_ms)


def deliver(collector: RoundCollector, peer: PeerId, number: int, norm: float = 1.0) -> Path:
    path = Path(f"{peer}-{number}")
    collector.admit(peer, number, str(path))
    collector.add(peer, number, path, str(path), norm)
    return path


def run_rounds(collector: RoundCollector, rounds: list[dict[PeerId, tuple[int, float]]]) -> list[set[PeerId]]:
    """Deliver updates, of samples and norm, round by round without outliers; return those of each round."""
    found = []
    for number, updates in enumerate(rounds, 1):
        collector.set_members(members(number, {peer: samples for peer, (samples, _) in updates.items()}), 0.0)
        for peer, (_, norm) in updates.items():
            deliver(collector, peer, number, norm)
        refused: set[PeerId] = set()
        while outliers := collector.find_outliers():
            refused |= outliers.keys()
            for peer in outliers:
                collector.refuse(peer, number)
        if not collector.is_empty:
            collector.close_round()
        found.append(refused)
    return found


@pytest.mark.parametrize(
    ("rounds", "outliers"),
    [
        ([{A: (8, 1.0), B: (8, 1e6)}], [{B}]),
        ([{A: (8, 1.0)}, {A: (8, 1e6)}], [set(), {A}]),
        ([{A: (8, 1e6)}], [set()]),
        ([{A: (8, 1.0), B: (8, 9.9)}, {A: (8, 1.0), B: (8, 1e-9)}], [set(), set()]),
        ([{A: (8, 0.0), B: (8, 1e6)}, {A: (8, 0.0)}], [set(), set()]),
        ([{A: (1, 1.0), B: (400, 300.0)}, {A: (400, 300.0)}], [set(), set()]),
        ([{A: (1, 1.0), B: (2, 30.0)}], [{B}]),
        ([{A: (8, 1.0), B: (8, 1.0)}, {A: (8, 99.0), B: (8, 99.0)}], [set(), set()]),
        ([{A: (8, 2.0 * n + 1)} for n in range(12)], [set()] * 12),
        ([{A: (8, 1.0), B: (8, 1.0)}] * 9 + [{A: (8, 1.0), B: (8, 11.0), C: (8, 1e3)}], [set()] * 9 + [{B, C}]),
    ],
    ids=[
        "against another member",
        "against the round before",
        "nothing to compare with",
        "small ones",
        "zeros say nothing",
        "as large as its samples",
        "larger than its samples",
        "all together",
        "while the learning rate warms up",
        "two",
    ],
)
def test_updates_much_larger_than_others_are_outliers(
    rounds: list[dict[PeerId, tuple[int, float]]], outliers: list[set[PeerId]]
) -> None:
    assert run_rounds(RoundCollector({A, B, C}), rounds) == outliers


def test_an_outlier_is_described() -> None:
    collector = RoundCollector({A, B})
    run_rounds(collector, [{A: (8, 2.5), B: (8, 3.5)}])
    collector.set_members(members(2, {A: 8, B: 8}), 0.0)
    deliver(collector, A, 2, 2.0)
    deliver(collector, B, 2, 3e6)
    why = "its norm 3e+06 is over 10 times that of other updates, for which 2 and 3 is usual"
    assert collector.find_outliers() == {B: why}


def test_non_members_and_wrong_rounds_are_refused() -> None:
    collector = RoundCollector({A, B})
    with pytest.raises(UpdateRefusedError, match="not a member of this job"):
        deliver(collector, OUTSIDER, 1)
    collector.set_members(members(3, {A: 1}), 0.0)
    for peer, number, why in (
        (B, 3, "not a member of round 3"),
        (A, 2, "round 2 is over"),
        (A, 9, "too far ahead"),
        (OUTSIDER, 4, "not a member of this job"),
    ):
        with pytest.raises(UpdateRefusedError, match=why):
            deliver(collector, peer, number)
    deliver(collector, A, 3)
    assert collector.close_round().round == 3


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (members(1, {A: 1}), "round 1 is over"),
        (members(9, {A: 1}), "too far ahead"),
        (members(2, {}), "at least one member"),
    ],
)
def test_members_of_an_invalid_round_are_refused(message: SetMembers, reason: str) -> None:
    collector = RoundCollector({A})
    collector.set_members(members(1, {A: 1}), 0.0)
    deliver(collector, A, 1)
    collector.close_round()
    found, _ = collector.set_members(message, 0.0)
    assert reason in str(found)


class Rounds(RuleBasedStateMachine):
    """Random pushes, announcements and delays; every round counts exactly the updates of its members."""

    everybody = (A, B, C, OUTSIDER)

    def __init__(self) -> None:
        super().__init__()
        self.collector = RoundCollector({A, B, C})
        self.now = 0.0
        self.count = 0
        self.closed = 0
        self.used: set[Path] = set()
        self.latest: dict[int, dict[PeerId, int]] = {}

    @rule(
        ahead=st.integers(-1, 5),
        samples=st.dictionaries(st.sampled_from(everybody), st.integers(0, 9), max_size=4),
        deadline=st.integers(0, 3000),
    )
    def name(self, ahead: int, samples: dict[PeerId, int], deadline: int) -> None:
        number = max(1, (self.collector.round or 1) + ahead)
        reason, dropped = self.collector.set_members(members(number, samples, deadline), self.now)
        if reason is None:
            assert samples
            assert number > self.closed
            self.latest[number] = samples
            assert all(path not in self.used for path in dropped)

    @rule(peer=st.sampled_from(everybody), ahead=st.integers(-2, 6))
    def push(self, peer: PeerId, ahead: int) -> None:
        number = max(1, (self.collector.round or 1) + ahead)
        self.count += 1
        path = Path(f"{number}/{peer}/{self.count}")
        try:
            self.collector.add(peer, number, path, str(path), 1.0)
        except UpdateRefusedError:
            return
        assert number > self.closed
        assert peer in self.latest.get(number, dict.fromkeys(self.everybody))

    @rule(seconds=st.floats(0, 2))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        if self.collector.seconds_until_due(self.now) != 0.0:
            return
        try:
            done = self.collector.close_round()
        except EmptyRoundError:
            return
        assert done.round > self.closed
        self.closed = done.round
        named = self.latest[done.round]
        assert {peer for peer, _, _ in done.updates} | set(done.missing) == set(named)
        for peer, path, weight in done.updates:
            assert weight == named[peer]
            assert path not in self.used
            assert path.parts[:2] == (str(done.round), str(peer)), "another round's or peer's update was counted"
            self.used.add(path)


TestRounds = Rounds.TestCase
TestRounds.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)


SHAPES = {"weight": (30, 7), "bias": (7,), "scale": (), "running_mean": (5,)}
STATISTICS = frozenset({"running_mean"})
ROUNDS = 20
WEIGHTS = (4.0, 1.0, 2.0, 1.0)


def write(path: Path, arrays: dict[str, NDArray[np.float32]]) -> Path:
    write_update(path, SHAPES, arrays.items(), UpdateMetadata(statistics=STATISTICS))
    return path


def read(path: Path) -> dict[str, NDArray[np.float32]]:
    with TensorFile(path) as file:
        return {name: file.tensor(name) for name in file.tensors}


def check(folder: Path, rate: float, momentum: float, nesterov: bool, scale: float, seed: int) -> float:
    """Take outer steps and add their updates to a model; its momentum is the server's to the bit.

    Returns:
        The largest difference from the momentum in float64, relative to the largest momentum so far.
    """
    rng, optimizer = np.random.default_rng(seed), Nesterov(learning_rate=rate, momentum=momentum, nesterov=nesterov)
    (folder / "model").mkdir()
    infos = {name: TensorInfo("BF16", shape) for name, shape in SHAPES.items()}
    with TensorFileWriter(folder / "model" / "model.safetensors", infos) as writer:
        for name, shape in SHAPES.items():
            writer.write(name, np.zeros(shape))
    model = GlobalModel(folder / "model", folder / "state", optimizer)
    worst = largest = 0.0
    exact = {name: np.zeros(shape) for name, shape in SHAPES.items() if name not in STATISTICS}
    for number in range(1, ROUNDS + 1):
        updates = [{n: rng.normal(0, scale, s).astype("f4") for n, s in SHAPES.items()} for _ in WEIGHTS]
        files = [(write(folder / str(i), u), w) for i, (u, w) in enumerate(zip(updates, WEIGHTS, strict=True))]
        step = folder / "outer"
        outer_step(files, folder / "momentum", step, optimizer, UpdateMetadata(number, None, STATISTICS))
        model.add(step, number)
        of_server, of_scheduler = read(folder / "momentum"), read(model.directory(number) / MOMENTUM)
        assert of_scheduler.keys() == exact.keys()
        for name in exact:
            mean = sum(w * u[name].astype("f8") for w, u in zip(WEIGHTS, updates, strict=True)) / sum(WEIGHTS)
            exact[name] = momentum * exact[name] + mean
            np.testing.assert_array_equal(of_scheduler[name], of_server[name], err_msg=f"{name} in round {number}")
            largest = max(largest, float(np.abs(exact[name]).max()))
            worst = max(worst, float(np.abs(of_scheduler[name] - exact[name]).max()) / largest)
    return worst


@settings(max_examples=15, deadline=None)
@given(
    rate=st.floats(0.01, 10),
    momentum=st.floats(0.01, 0.99),
    nesterov=st.booleans(),
    scale=st.floats(1e-6, 10),
    seed=st.integers(0, 2**32 - 1),
)
def test_momentum_of_any_settings(rate: float, momentum: float, nesterov: bool, scale: float, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        # update and momentum are rounded to float32 in each round: 2 half units in the last place, never damped here
        assert check(Path(folder), rate, momentum, nesterov, scale, seed) <= ROUNDS * 2 * 2**-24 * 1.1
