"""One file through a gateway's relay, beside two TLS hops through a plain asyncio forwarder.

Ours is encrypted end to end inside the circuit as well: what the gateway passes on it cannot read.
"""

from __future__ import annotations

from contextlib import ExitStack

from benchmarks.children import started
from benchmarks.measures.transfer import _tls, pull
from benchmarks.setting import Setting
from benchmarks.tables import Row, paired


def measure(setting: Setting) -> list[Row]:
    """In turns."""
    source, digest = setting.file("source", setting.size)
    issue = setting.organisation.node
    ours, reference = [], []
    with ExitStack() as stack:
        gateway = stack.enter_context(started("node", files=issue("gateway", "gateway"), role="gateway"))
        taker, giver = (
            stack.enter_context(started("node", files=issue(name), gateway=gateway.about["address"], listen=False))
            for name in "ab"
        )
        giver.ask("offer", path=str(source), digest=digest)
        taker.ask("connect", address=giver.ask("circuit"))
        tls_taker, tls_giver = (stack.enter_context(started("tls", files=issue(name))) for name in "cd")
        port = tls_giver.ask("listen", path=str(source))
        forwarder = stack.enter_context(started("forwarder", files=issue("forwarder"), port=port))
        tls_taker.ask("connect", port=forwarder.about["port"])
        for _ in range(setting.repeat):
            reference.append(_tls(setting, tls_taker, digest))
            ours.append(pull(setting, taker, giver, digest, 1))
    return [paired("one transfer through a relay", ours, reference, "two TLS hops by asyncio", "0.5")]
