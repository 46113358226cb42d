"""Lazy imports of py-libp2p: each is still needed, none is used by a node, and stock py-libp2p works beside them.

An upgrade of py-libp2p that makes an entry of `PACKAGES` or `MODULES` needless or wrong fails here. What is imported
shows only in a new interpreter, so most of these tests run one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hypha_net._libp2p.compat import lean_import
from hypha_net._libp2p.compat.lean_import import MODULES, PACKAGES, LazyInstance, LazyModule

UNUSED = (
    "acme",
    "aioquic",
    "coincurve",
    "Crypto",
    "dns",
    "httpx",
    "noise",
    "prometheus_client",
    "requests",
    "zeroconf",
)
BRINGS = {
    "libp2p.transport": "wsproto",
    "libp2p.security": "libp2p.security.noise",
    "libp2p.crypto.rsa": "Crypto",
    "libp2p.crypto.secp256k1": "coincurve",
    "libp2p.discovery.mdns.mdns": "zeroconf",
    "libp2p.metrics.swarm": "prometheus_client",
    "libp2p.rcmgr.prometheus_exporter": "prometheus_client",
    "libp2p.relay.circuit_v2.nat": "libp2p.kad_dht",
    "libp2p.security.pnet.protector": "Crypto",
    "libp2p.security.tls.autotls.acme": "httpx",
    "libp2p.security.tls.autotls.broker": "requests",
    "libp2p.transport.quic.stream": "aioquic",
    "multiaddr.resolvers": "dns",
}
ENGINE = "import hypha_net._libp2p.endpoint"


def in_new_interpreter(code: str, *args: str) -> Any:
    """Run a program in a new interpreter; return what its last line of output says, as JSON."""
    command = [sys.executable, "-c", code, *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_engine_imports_no_library_of_a_feature_that_is_off() -> None:
    found = in_new_interpreter(f"import json, sys\n{ENGINE}\nprint(json.dumps(sorted(sys.modules)))")
    assert [name for name in UNUSED if name in found] == []
    assert "libp2p.network.swarm" in found


def test_every_lazy_import_has_a_reason() -> None:
    assert set(BRINGS) == {*PACKAGES[1:], *MODULES}


@pytest.mark.upstream
@pytest.mark.parametrize("name", BRINGS)
def test_a_lazy_import_is_still_needed(name: str) -> None:
    code = f"""
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("lean_import", {lean_import.__file__!r})
lean_import = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lean_import)
lean_import.PACKAGES = tuple(each for each in lean_import.PACKAGES if each != sys.argv[1])
lean_import.MODULES = {{each: paths for each, paths in lean_import.MODULES.items() if each != sys.argv[1]}}
lean_import.install()
{ENGINE}
print(json.dumps(sorted(sys.modules)))
"""
    assert BRINGS[name] in in_new_interpreter(code, name), f"{name} can be imported as it is"


def test_the_lazy_names_are_those_that_py_libp2p_takes() -> None:
    code = f"""
import json, sys
{ENGINE}
from hypha_net._libp2p.compat.lean_import import MODULES
print(json.dumps({{name: [sorted(sys.modules[name].requested), sorted(sys.modules[name].names)] for name in MODULES}}))
"""
    for name, (requested, listed) in in_new_interpreter(code).items():
        assert requested == listed, name


def test_a_working_node_loads_nothing_that_is_lazy(authority: Any) -> None:
    code = """
import json, sys
from pathlib import Path
import anyio
from hypha_net import EndpointSettings, open_endpoint
from hypha_net.identity import load_identity

identities = [load_identity(*map(Path, files)) for files in json.loads(sys.argv[1])]

async def answer(stream):
    await stream.send_eof(await stream.receive_some())

async def hear(gateway, node):
    async with gateway.subscribe("topic") as messages:
        with anyio.fail_after(20):
            while True:
                await node.publish("topic", b"news")
                with anyio.move_on_after(0.5):
                    return await anext(messages)

async def main():
    listen = ("/ip4/127.0.0.1/tcp/0",)
    async with open_endpoint(identities[0], EndpointSettings(listen, role="gateway")) as gateway:
        gateway.handle("/answer", answer)
        async with open_endpoint(identities[1], EndpointSettings(listen, gateway_addresses=gateway.addresses)) as node:
            while not node.connected_peers():
                await anyio.sleep(0.05)
            stream = await node.open_stream(gateway.peer_id, ["/answer"])
            await stream.send_eof(b"question")
            assert await stream.receive_some() == b"question"
            assert (await hear(gateway, node)).data == b"news"
            await node.find_peers()

anyio.run(main, backend="trio")
from hypha_net._libp2p.compat.lean_import import MODULES, PACKAGES
print(json.dumps([name for name in (*PACKAGES, *MODULES) if not type(sys.modules[name]).__name__.startswith("Lazy")]))
"""
    files = [[str(path) for path in authority.files(name)] for name in ("gateway", "node")]
    assert in_new_interpreter(code, json.dumps(files)) == []


@pytest.mark.nightly
def test_a_program_that_imported_the_engine_first_gets_all_of_py_libp2p() -> None:
    code = f"""
import json, sys
{ENGINE}
from hypha_net._libp2p.compat import lean_import
assert lean_import.is_installed()
from libp2p import new_host
host = new_host()
import libp2p.transport
from libp2p.crypto import serialization
from libp2p.network import swarm
from multiaddr.resolvers import DNSResolver
modules = [module for name, module in sys.modules.items() if name.startswith(("libp2p", "multiaddr"))]
lazy = [value for module in modules for value in vars(module).values() if type(value) is lean_import.LazyName]
assert lazy == [], lazy
assert serialization.RSAPublicKey is libp2p.crypto.rsa.RSAPublicKey
assert swarm.DNSResolver is DNSResolver and isinstance(host.get_network().dns_resolver, DNSResolver)
assert libp2p.transport.WebsocketTransport and libp2p.QUICTransport and libp2p.__version__ == "0.8.1"
print(json.dumps(lean_import.is_installed()))
"""
    assert in_new_interpreter(code) is False


@pytest.mark.nightly
def test_a_program_that_imported_py_libp2p_first_keeps_it() -> None:
    code = f"""
import json, sys
from libp2p import new_host
before = dict(sys.modules)
{ENGINE}
from hypha_net._libp2p.compat import lean_import
assert all(sys.modules[name] is module for name, module in before.items())
print(json.dumps(lean_import.is_installed()))
"""
    assert in_new_interpreter(code) is False


def test_keys_of_kinds_that_no_node_has_are_still_read() -> None:
    code = f"""
import json
{ENGINE}
from libp2p.crypto.serialization import deserialize_public_key
from libp2p.peer.id import ID
from Crypto.PublicKey import RSA
from libp2p.crypto.pb.crypto_pb2 import PublicKey
key = PublicKey(key_type=0, data=RSA.generate(1024).public_key().export_key("DER")).SerializeToString()
print(json.dumps(deserialize_public_key(key).get_type().name))
"""
    assert in_new_interpreter(code) == "RSA"


def test_our_host_is_what_new_host_makes_of_the_same_settings(authority: Any) -> None:
    from libp2p import new_host
    from libp2p.custom_types import TProtocol
    from libp2p.network.config import ConnectionConfig

    from hypha_net._libp2p.compat.host import make_host
    from hypha_net._libp2p.security.contexts import TlsContexts
    from hypha_net._libp2p.security.tls import TLS_PROTOCOL, SecurityState, TlsTransport, libp2p_key_pair
    from hypha_net._libp2p.streams.inbound import NEGOTIATE_TIMEOUT
    from hypha_net._libp2p.yamux.session import PROTOCOL, YamuxSession
    from hypha_net.events import Events

    identity = authority.identity("node")
    records = SecurityState(TlsContexts(identity), Events())
    ours = make_host(identity, records, 100, list)
    muxers: Any = {TProtocol(PROTOCOL): YamuxSession}
    stock: Any = new_host(
        key_pair=libp2p_key_pair(identity),
        sec_opt={TLS_PROTOCOL: TlsTransport(identity, records)},
        muxer_opt=muxers,
        connection_config=ConnectionConfig(
            max_connections=100, min_connections=0, low_watermark=0, high_watermark=100, max_connections_per_peer=8
        ),
        disable_identify_address_discovery=True,
        negotiate_timeout=NEGOTIATE_TIMEOUT,
    )
    replaced = {"get_addrs", "_do_handle_inbound_connection"}  # by `make_host`, on the instance
    assert described(ours, replaced) == described(stock, replaced)
    assert ours.get_id() == stock.get_id()
    assert ours.get_private_key() == stock.get_private_key()
    swarms: list[Any] = [ours.get_network(), stock.get_network()]
    swarms[1].set_resource_manager(None)
    assert described(swarms[0], replaced) == described(swarms[1], replaced)
    assert [list(swarm.upgrader.security_multistream.transports) for swarm in swarms] == [[TLS_PROTOCOL]] * 2
    transports = [[type(each) for each in swarm.transport_manager.get_transports()] for swarm in swarms]
    assert transports[0] == transports[1]


def described(thing: object, without: set[str]) -> dict[str, object]:
    """Return an object's attributes: plain values and dataclasses as they are, others by their type."""
    plain = (bool, int, float, str, bytes, type(None))
    return {
        name: repr(value) if isinstance(value, plain) or hasattr(value, "__dataclass_fields__") else type(value)
        for name, value in vars(thing).items()
        if name not in without
    }


def test_a_lazy_name_is_loaded_when_it_is_used(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "lazily.py").write_text(
        "class Thing:\n    kind = 'thing'\n    @classmethod\n    def make(cls): return cls()\nclass Late(Thing): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def lazily() -> Any:
        spec = lean_import._find_spec("lazily")
        module = LazyModule(spec, ("Thing.make", "Late()"))
        monkeypatch.setitem(sys.modules, "lazily", module)
        return module

    def is_loaded() -> bool:
        return type(sys.modules["lazily"]) is ModuleType

    module = lazily()
    make = module.Thing.make
    assert not isinstance(make, module.Thing)
    assert not is_loaded()
    assert isinstance(make(), module.Thing)
    assert is_loaded()

    module = lazily()
    late: Any = module.Late()
    assert type(late) is LazyInstance
    assert not is_loaded()
    late.name = "assigned"
    assert not is_loaded()
    assert late.kind == "thing"
    assert is_loaded()
    assert vars(late)["_created"].name == "assigned"

    module = lazily()

    class Derived(module.Thing):  # type: ignore[misc,name-defined]
        pass

    assert is_loaded()
    assert Derived().kind == "thing"
    module = lazily()
    with pytest.raises(AttributeError):
        _ = module.Missing
    assert is_loaded()


def test_another_version_of_py_libp2p_is_told_by_name() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"no module libp2p\.nothing\.here: hypha-net needs libp2p 0\.8\.1"):
        lean_import._find_spec("libp2p.nothing.here")
