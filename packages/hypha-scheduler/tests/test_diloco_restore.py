"""Restoring DiLoCo from its journal: the state is the one after the last closed round, whatever workers reported."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypha_proto.ids import PeerId
from hypha_proto.progress import BatchDone, OuterStepTaken, RoundMetrics, SendingUpdate, UpdateMerged
from hypha_scheduler.jobs.journal import Journal, read_journal
from hypha_scheduler.strategies.base import WriteJournal
from hypha_scheduler.strategies.diloco.events import round_closed_effects
from hypha_scheduler.strategies.diloco.restore import restore
from hypha_scheduler.strategies.diloco.rounds import RoundClosed, Rounds, RoundSettings
from hypha_scheduler.strategies.diloco.slices import Assignment, SliceLedger, SliceState
from hypha_scheduler.strategies.diloco.training_state import TrainingState

PEERS = [PeerId.from_public_key(bytes([number]) * 32) for number in range(3)]
SERVER = PeerId.from_public_key(bytes([9]) * 32)
SLICES, SAMPLES, BATCH, ROUNDS, SEED = 6, 12, 4, 3, 5
KINDS = ["slice", "batch", "batch", "post", "metrics", "merged", "step", "lose", "round"]
STEP = st.tuples(st.sampled_from(KINDS), st.sampled_from(PEERS))


class Writer:
    """Feeds reports to a training state and writes its records to a journal, as the operator does."""

    def __init__(self, path: Path) -> None:
        ledger = SliceLedger([SAMPLES] * SLICES, SEED, BATCH)
        self.state = TrainingState(Rounds(RoundSettings(ROUNDS, 24, BATCH, 1), PEERS, 0.0), ledger, SERVER)
        self.journal = Journal(path)
        self.now = 0.0
        self.recorded = 0
        self.samples: Counter[PeerId] = Counter()
        self.batches: Counter[PeerId] = Counter()
        self.loss: float | None = None
        self.used: set[Assignment] = set()

    def act(self, what: str, peer: PeerId, loss: float) -> None:
        if what == "round":
            self.train_round(loss, ("slice", "batch", "post"))
            return
        self.now += 1.0
        state = self.state
        number = state.rounds.closed + 1
        effects: tuple[object, ...] = ()
        if what == "slice" and len(state.slices.held_by(peer)) < 3:
            state.slice_for(peer, self.now)
        elif what == "batch" and (held := state.slices.held_by(peer)):
            effects = state.report(peer, BatchDone(batch_size=BATCH, slices={str(held[0].index): BATCH}), self.now)[1]
        elif what == "post":
            effects = state.report(peer, SendingUpdate(), self.now)[1]
        elif what == "metrics":
            for closed in (number - 1, number):
                effects += state.report(peer, RoundMetrics(round=closed, metrics={"loss": loss}), self.now)[1]
        elif what == "merged":
            effects = state.report(peer, UpdateMerged(), self.now)[1]
        elif what == "step":
            effects = state.report(SERVER, OuterStepTaken(), self.now)[1]
        elif what == "lose" and len(state.rounds.members) > 1:
            effects = state.worker_lost(peer, "gone", self.now)
        self.record(effects)

    def train_round(self, loss: float, steps: Sequence[str]) -> None:
        """Let all workers take these steps, then the parameter server its outer step, and all merge it."""
        for peer in PEERS:
            for what in steps:
                self.act(what, peer, loss)
        self.act("step", SERVER, loss)
        for peer in PEERS:
            self.act("metrics", peer, loss)
            self.act("merged", peer, loss)

    def record(self, effects: tuple[object, ...]) -> None:
        for effect in effects:
            if isinstance(effect, RoundClosed):
                used = self.state.slices.take_used()
                self.used.update(used)
                self.samples.update(effect.samples)
                self.batches.update(effect.batches)
                self.recorded, self.loss = effect.round, effect.loss
                for found in round_closed_effects(effect, 0, used):
                    if isinstance(found, WriteJournal):
                        self.journal.append(found.kind, **found.fields)


@settings(max_examples=150, deadline=None)
@given(steps=st.lists(STEP, max_size=120), loss=st.floats(0, 100))
def test_restored_state_is_that_after_the_last_recorded_round(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, PeerId]], loss: float
) -> None:
    path = tmp_path_factory.getbasetemp() / uuid.uuid4().hex
    writer = Writer(path)
    with writer.journal:
        writer.journal.record("accepted")
        for what, peer in steps:
            writer.act(what, peer, loss)
    restored = restore(read_journal(path))
    assert restored.closed == writer.recorded
    assert (restored.samples, restored.batches) == (writer.samples, writer.batches)
    assert restored.loss == writer.loss
    assert set(restored.used_slices) == writer.used
    assert len(restored.used_slices) == len(writer.used)
    ledger = SliceLedger([SAMPLES] * SLICES, SEED, BATCH)
    ledger.restore(restored.used_slices)
    for epoch in range(3):
        for index in range(SLICES):
            used = Assignment(epoch, index) in writer.used
            assert (ledger.state(epoch, index) is SliceState.USED) == used
    handed_out = [ledger.assign(number) for number in range(2 * SLICES)]  # partially used ones are among them
    assert not set(handed_out) & writer.used
    assert len(set(handed_out)) == len(handed_out)


def test_a_complete_run_is_restored(tmp_path: Path) -> None:
    """Three rounds of three workers, with a slice in progress at the end of each."""
    writer = Writer(tmp_path / "journal")
    with writer.journal:
        for _ in range(ROUNDS):
            writer.train_round(0.5, ("slice", "batch", "batch", "batch", "slice", "batch", "post"))
    restored = restore(read_journal(tmp_path / "journal"))
    assert restored.closed == ROUNDS
    assert (restored.samples, restored.batches) == (writer.state.samples, writer.state.batches)
    assert sum(restored.samples.values()) == ROUNDS * 3 * 4 * BATCH
    assert restored.loss == 0.5
    assert set(restored.used_slices) == writer.used
