"""Rate of a file transfer between two processes over mutual TLS: ours, blocking `ssl`, stock py-libp2p."""

from __future__ import annotations

from contextlib import ExitStack

from benchmarks.children import Child, start_child
from benchmarks.run import MIB, BenchmarkRun
from benchmarks.tables import Row, paired

AT_ONCE = 4
STOCK_SHARE = 8
"""Stock py-libp2p gets a file smaller by this factor, as it is slower."""


def measure(run: BenchmarkRun) -> list[Row]:
    """Measure in turns, on established connections."""
    source, digest = run.file("source", run.size)
    part, part_digest = run.file("part", run.size // AT_ONCE)
    less, less_digest = run.file("less", max(MIB, run.size // STOCK_SHARE))
    rates: dict[str, list[float]] = {"ours": [], "four": [], "tls": [], "stock": []}
    with ExitStack() as stack:
        taker, giver = node_pair(stack, run)
        tls_taker, tls_giver = (stack.enter_context(start_child("tls", files=run.organisation.node(n))) for n in "cd")
        tls_taker.ask("connect", port=tls_giver.ask("listen", path=str(source)))
        stock_taker, stock_giver = (stack.enter_context(start_child("stock")) for _ in range(2))
        stock_taker.ask("connect", address=stock_giver.ask("offer", path=str(less)))
        for _ in range(run.repeat):
            rates["tls"].append(tls_rate(run, tls_taker, digest))
            giver.ask("offer", path=str(source), digest=digest)
            rates["ours"].append(pull_rate(run, taker, giver, digest, 1))
            giver.ask("offer", path=str(part), digest=part_digest)
            rates["four"].append(pull_rate(run, taker, giver, part_digest, AT_ONCE, part.stat().st_size))
            rates["stock"].append(_stock_rate(run, stock_taker, less.stat().st_size, less_digest))
    return [
        paired("one transfer", rates["ours"], rates["tls"], "blocking ssl", "0.75"),
        paired("one transfer", rates["ours"], rates["stock"], "stock py-libp2p", "5"),
        paired(
            f"{AT_ONCE} transfers at once, a quarter of the file each, in sum",
            rates["four"],
            rates["ours"],
            "one transfer",
            "1",
        ),
    ]


def node_pair(stack: ExitStack, run: BenchmarkRun) -> tuple[Child, Child]:
    """Start two nodes and connect them."""
    taker, giver = (stack.enter_context(start_child("node", files=run.organisation.node(n))) for n in "ab")
    taker.ask("connect", address=giver.about["address"])
    return taker, giver


def pull_rate(run: BenchmarkRun, taker: Child, giver: Child, digest: str, count: int, size: int | None = None) -> float:
    """Pull a file of `size` bytes (`run.size`) `count` times concurrently; return the total rate in MiB/s."""
    size = run.size if size is None else size
    targets = [run.folder / f"target-{index}" for index in range(count)]
    for target in targets:
        target.mkdir()  # each in its own folder, as jobs do
    places = [target / "file" for target in targets]
    run.settle()
    seconds = taker.ask("pull", peer=giver.about["peer"], digest=digest, targets=[str(place) for place in places])
    for target, place in zip(targets, places, strict=True):
        run.check_and_remove(place, size)
        target.rmdir()
    return count * size / MIB / float(seconds)


def tls_rate(run: BenchmarkRun, taker: Child, digest: str) -> float:
    """Fetch a file over blocking `ssl`; return the rate in MiB/s."""
    run.settle()
    target = run.folder / "target"
    seconds = taker.ask("take", target=str(target), digest=digest)
    run.check_and_remove(target, run.size)
    return run.size / MIB / float(seconds)


def _stock_rate(run: BenchmarkRun, taker: Child, size: int, digest: str) -> float:
    target = run.folder / "target"
    seconds = taker.ask("take", target=str(target), digest=digest)
    run.check_and_remove(target, size)
    return size / MIB / float(seconds)
