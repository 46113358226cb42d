"""What must hold of a DiLoCo job that was simulated by `diloco_network`, whatever has happened to it."""

from __future__ import annotations

from itertools import pairwise

from hypha_scheduler.audit.diloco import DilocoFindings, audit_records
from support.diloco_network import Network
from support.diloco_simulation import START, digest_of

Position = tuple[int, int, int]
"""Epoch, slice and place of a sample."""


def positions(ranges: list[tuple[int, int, int, int]]) -> list[Position]:
    """Return the samples of ranges."""
    return [(epoch, index, at) for epoch, index, first, end in ranges for at in range(first, end)]


def check_job(network: Network) -> None:
    """Check that there is one model, that each sample counts once, and that the journal proves it."""
    assert network.faults == []
    check_rounds(network)
    used = check_members(network)
    check_audit(network, used)
    check_ledger(network, used)


def check_rounds(network: Network) -> None:
    """Check that each round is recorded once and in order, and that its weights follow from those before."""
    rounds = network.rounds
    assert [record["round"] for record in rounds] == list(range(1, len(rounds) + 1))
    weights = START
    for record in rounds:
        assert record["weights_before"] == weights, record["round"]
        weights = digest_of(weights, record["update"])
        assert record["weights"] == weights, record["round"]
        assert network.momenta[record["update"]] == record["weights_before"], "the momentum is of another round"


def check_members(network: Network) -> set[Position]:
    """Check that the records name who was averaged, with what they really trained; return the samples that count."""
    taken: list[Position] = []
    for record in network.rounds:
        number, term, averaged = network.steps[record["update"]]
        assert (record["round"], record["term"]) == (number, term)
        assert [member["peer"] for member in record["members"]] == [str(peer) for peer in averaged], number
        for member in record["members"]:
            peer, trained_in, weights, used = network.truth[member["update"]]
            assert (str(peer), trained_in) == (member["peer"], number)
            assert weights == record["weights_before"], f"{peer} has trained from other weights in round {number}"
            assert [tuple(part) for part in member["ranges"]] == used
            assert member["samples"] == len(positions(used))
            taken += positions(used)
    assert len(set(taken)) == len(taken), "a sample was used twice"
    return set(taken)


def check_audit(network: Network, used: set[Position]) -> None:
    """Check that the audit of the journal finds the same."""
    findings = DilocoFindings()
    sizes = {index: size or 0 for index, size in enumerate(network.dataset.samples)}
    audit_records(network.journal, sizes, findings)
    assert findings.faults == []
    assert findings.samples == len(used)


def check_ledger(network: Network, used: set[Position]) -> None:
    """Check that each sample of the epochs that have begun is used, free, or in the hands of one worker."""
    running = None if network.scheduler is None else network.scheduler.operator._running
    if running is None:
        return
    ledger = running.training.slices
    spans = list(ledger.available)
    for peer in network.nodes:
        spans += ledger.held_by(peer)
        for number in range(1, network.table.rounds.update_rounds + 2):
            spans += ledger.contribution(peer, number) or ()
    held = [(span.epoch, span.index, at) for span in spans for at in range(span.first, span.end)]
    assert len(set(held)) == len(held), "a sample is in two places"
    assert not used & set(held), "a sample that was used is free"
    everything = {
        (epoch, index, at)
        for epoch in range(ledger.epoch + 1)
        for index, size in enumerate(network.dataset.samples)
        for at in range(size or 0)
    }
    assert used | set(held) == everything, "a sample was lost"


def check_waits(network: Network, longest: float) -> None:
    """Check that no round took longer than some seconds, apart from pauses and times without a scheduler."""
    times = [(at, number) for at, kind, number in network.record_times if kind == "round"]
    pauses = [(at - float(str(fields["seconds"])), at) for at, name, fields in network.events if name == "continued"]
    for (before, _), (after, number) in pairwise(times):
        stood = _covered([*pauses, *network.absences], before, after)
        assert after - before - stood <= longest, (
            f"round {number} took {after - before:.0f} s, of which it stood {stood:.0f}"
        )


def _covered(spans: list[tuple[float, float]], before: float, after: float) -> float:
    """Return how many of the seconds from `before` to `after` are in any of the spans."""
    covered, reached = 0.0, before
    for begin, end in sorted(spans):
        begin, end = max(begin, reached), min(end, after)
        if end > begin:
            covered, reached = covered + end - begin, end
    return covered


def durations(network: Network) -> list[float]:
    """Return the seconds between the records of consecutive rounds, beginning with the second."""
    times = [at for at, kind, _ in network.record_times if kind == "round"]
    return [after - before for before, after in pairwise(times)]
