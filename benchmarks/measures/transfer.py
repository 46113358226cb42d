"""A file from process to process over mutual TLS, its digest checked on arrival: ours, blocking `ssl`, stock libp2p."""

from __future__ import annotations

from contextlib import ExitStack

from benchmarks.children import Child, started
from benchmarks.setting import MIB, Setting
from benchmarks.tables import Row, paired

AT_ONCE = 4
STOCK_SHARE = 8
"""Stock libp2p moves so much less in the same time."""


def measure(setting: Setting) -> list[Row]:
    """In turns, on connections that stand already."""
    source, digest = setting.file("source", setting.size)
    less, less_digest = setting.file("less", max(MIB, setting.size // STOCK_SHARE))
    rates: dict[str, list[float]] = {"ours": [], "four": [], "tls": [], "stock": []}
    with ExitStack() as stack:
        taker, giver = node_pair(stack, setting)
        giver.ask("offer", path=str(source), digest=digest)
        tls_taker, tls_giver = (stack.enter_context(started("tls", files=setting.organisation.node(n))) for n in "cd")
        tls_taker.ask("connect", port=tls_giver.ask("listen", path=str(source)))
        stock_taker, stock_giver = (stack.enter_context(started("stock")) for _ in range(2))
        stock_taker.ask("connect", address=stock_giver.ask("offer", path=str(less)))
        for _ in range(setting.repeat):
            rates["tls"].append(_tls(setting, tls_taker, digest))
            rates["ours"].append(pull(setting, taker, giver, digest, 1))
            rates["four"].append(pull(setting, taker, giver, digest, AT_ONCE))
            rates["stock"].append(_stock(setting, stock_taker, less.stat().st_size, less_digest))
    return [
        paired("one transfer", rates["ours"], rates["tls"], "blocking ssl", "0.6, aim 0.8"),
        paired("one transfer", rates["ours"], rates["stock"], "stock py-libp2p", "5"),
        paired(f"{AT_ONCE} transfers at once, in sum", rates["four"], rates["ours"], "one transfer", "1"),
    ]


def node_pair(stack: ExitStack, setting: Setting) -> tuple[Child, Child]:
    """Two connected nodes."""
    taker, giver = (stack.enter_context(started("node", files=setting.organisation.node(n))) for n in "ab")
    taker.ask("connect", address=giver.about["address"])
    return taker, giver


def pull(setting: Setting, taker: Child, giver: Child, digest: str, count: int) -> float:
    """Pull a file `count` times at once; MiB/s in sum."""
    targets = [setting.folder / f"target-{index}" for index in range(count)]
    for target in targets:
        target.mkdir()  # each in a folder of its own, as jobs have them
    places = [target / "file" for target in targets]
    seconds = taker.ask("pull", peer=giver.about["peer"], digest=digest, targets=[str(place) for place in places])
    for target, place in zip(targets, places, strict=True):
        setting.arrived(place, setting.size)
        target.rmdir()
    return count * setting.size / MIB / float(seconds)


def _tls(setting: Setting, taker: Child, digest: str) -> float:
    target = setting.folder / "target"
    seconds = taker.ask("take", target=str(target), digest=digest)
    setting.arrived(target, setting.size)
    return setting.size / MIB / float(seconds)


def _stock(setting: Setting, taker: Child, size: int, digest: str) -> float:
    target = setting.folder / "target"
    seconds = taker.ask("take", target=str(target), digest=digest)
    setting.arrived(target, size)
    return size / MIB / float(seconds)
