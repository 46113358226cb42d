"""Lazy imports inside py-libp2p: its engine without QUIC, ACME, mDNS, the Kademlia DHT and what those bring.

Importing any submodule of py-libp2p executes ``libp2p/__init__.py``, which imports every transport and every security
protocol. Modules that a node does run (`Swarm`, `BasicHost`, `ID`) import others for a feature that is off. Together that
is more than half of the time and memory of an import (docs/upstream.md).

`install` puts two kinds of modules into `sys.modules` before anything else imports py-libp2p:

- `LazyPackage`: a package whose ``__init__.py`` is executed at the first access to one of its attributes. Importing a
  submodule is no such access.
- `LazyModule`: a module that hands out a `LazyName` for each name that py-libp2p takes from it with ``from … import``. The
  real module is imported when such a name is called or instantiated, or when any other attribute is asked for.

The semantics are those of PEP 810 (explicit lazy imports), limited to the modules in `PACKAGES` and `MODULES`. Programs that
want all of py-libp2p in the same process get it: ``from libp2p import new_host`` executes the real package, after `restore`.

Called by ``hypha_net._libp2p.__init__``; `hypha_net._libp2p.host` builds the host without `libp2p.new_host`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Final

PACKAGES: Final = ("libp2p", "libp2p.transport", "libp2p.security", "libp2p.relay", "libp2p.relay.circuit_v2")
"""Packages whose ``__init__.py`` imports what no Hypha node runs, parents first."""

MODULES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "libp2p.transport.quic.stream": ("QUICStream",),
        "libp2p.crypto.rsa": ("RSAPrivateKey.from_bytes", "RSAPublicKey.from_bytes"),
        "libp2p.crypto.secp256k1": ("Secp256k1PrivateKey.from_bytes", "Secp256k1PublicKey.from_bytes"),
        "libp2p.discovery.bootstrap.bootstrap": ("BootstrapDiscovery",),
        "libp2p.discovery.mdns.mdns": ("MDNSDiscovery", "create_mdns_discovery"),
        "libp2p.discovery.upnp.upnp": ("UpnpManager",),
        "libp2p.metrics.swarm": ("SwarmEvent",),
        "libp2p.rcmgr.memory_stats": ("MemoryStats", "MemoryStatsCache", "get_global_memory_cache"),
        "libp2p.rcmgr.prometheus_exporter": ("PrometheusExporter", "create_prometheus_exporter"),
        "libp2p.security.pnet.protector": ("new_protected_conn",),
        "libp2p.security.tls.autotls.acme": ("ACMEClient", "compute_b36_peer_id"),
        "libp2p.security.tls.autotls.broker": ("BrokerClient",),
        "multiaddr.resolvers": ("DNSResolver()",),
        "multiaddr.utils": ("get_multiaddr_options", "get_network_addrs", "get_thin_waist_addresses"),
    }
)
"""Modules that are imported for a feature which is off here, and the names that are taken from them.

``Name.attribute`` makes that attribute of the name lazy too, and ``Name()`` calls of the name: the object is made when
something of it is used. Everything else that is asked of a name imports its module.
"""


class LazyPackage(ModuleType):
    """A package that executes its ``__init__.py`` in place at the first access to one of its attributes."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec.name)
        self.__spec__ = spec
        self.__package__ = spec.name
        self.__loader__ = spec.loader
        self.__file__ = spec.origin
        self.__path__ = list(spec.submodule_search_locations or ())

    def __getattr__(self, name: str) -> Any:
        if _is_probe(name):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        restore()
        return getattr(self, name)

    def execute(self) -> None:
        """Execute ``__init__.py``; from then on this is an ordinary module."""
        spec = self.__spec__
        assert spec is not None and spec.loader is not None
        self.__class__ = ModuleType  # type: ignore[assignment]  # what `importlib.util.LazyLoader` does
        spec.loader.exec_module(self)


class LazyModule(ModuleType):
    """A module that hands out lazy names until one of them is used."""

    def __init__(self, spec: ModuleSpec, names: tuple[str, ...]) -> None:
        super().__init__(spec.name)
        self.__spec__ = spec
        self.__package__ = spec.parent
        self.__file__ = spec.origin
        self._loaded: ModuleType | None = None
        self._names = {name: LazyName(self, name, names) for name in {path.partition(".")[0].removesuffix("()") for path in names}}
        self.requested: set[str] = set()
        """Names that were taken; a name that nobody takes is needless (for tests)."""

    def __getattr__(self, name: str) -> Any:
        if _is_probe(name):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        lazy = self._names.get(name)
        if lazy is None or self._loaded is not None:
            return getattr(self.load(), name)
        self.requested.add(name)
        return lazy

    def load(self) -> ModuleType:
        """Return the real module; the first call imports it and puts its objects in place of the lazy names."""
        if self._loaded is None:
            if sys.modules.get(self.__name__) is self:
                del sys.modules[self.__name__]
            module = self._loaded = importlib.import_module(self.__name__)
            _replace({id(lazy): getattr(module, name) for name, lazy in self._names.items()})
        return self._loaded


class LazyName:
    """A class or function of a module that is not imported yet."""

    def __init__(self, module: LazyModule, path: str, lazy: tuple[str, ...]) -> None:
        self._module = module
        self._path = path
        self._lazy = lazy

    def _resolve(self) -> Any:
        found: Any = self._module.load()
        for name in self._path.split("."):
            found = getattr(found, name)
        return found

    def __getattr__(self, name: str) -> Any:
        path = f"{self._path}.{name}"
        return LazyName(self._module, path, self._lazy) if path in self._lazy else getattr(self._resolve(), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if f"{self._path}()" in self._lazy:
            return LazyInstance(self, args, kwargs)
        return self._resolve()(*args, **kwargs)

    def __instancecheck__(self, instance: object) -> bool:
        """Whether `instance` is one of this class: nothing is, as long as its module has not been executed."""
        name = self._module.__name__
        return not isinstance(sys.modules.get(name), LazyModule) and isinstance(instance, self._resolve())

    def __mro_entries__(self, _bases: tuple[object, ...]) -> tuple[Any, ...]:
        return (self._resolve(),)


class LazyInstance:
    """An object that is made when something of it is used."""

    def __init__(self, name: LazyName, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._make = lambda: name._resolve()(*args, **kwargs)
        self._made: Any = None

    def __getattr__(self, name: str) -> Any:
        if self._made is None:
            self._made = self._make()
        return getattr(self._made, name)


def install() -> None:
    """Make py-libp2p's imports lazy, unless something has imported it already; then there is nothing to win."""
    if "libp2p" in sys.modules:
        return
    for name in PACKAGES:
        _put(LazyPackage(_spec_of(name)))
    for name, names in MODULES.items():
        if name not in sys.modules:
            _put(LazyModule(_spec_of(name), names))


def restore() -> None:
    """Import everything that is still lazy, as it would be without `install`."""
    for module in list(sys.modules.values()):
        if isinstance(module, LazyModule):
            module.load()
    for package in [sys.modules.get(name) for name in reversed(PACKAGES)]:
        if isinstance(package, LazyPackage):
            package.execute()


def is_installed() -> bool:
    """Whether ``libp2p/__init__.py`` has not been executed in this process."""
    return isinstance(sys.modules.get("libp2p"), LazyPackage)


def _spec_of(name: str) -> ModuleSpec:
    """Find a module without importing its parents, which `importlib.util.find_spec` does."""
    root, *below = name.split(".")
    spec = PathFinder.find_spec(root)
    if spec is not None and below:
        folders = [str(Path(folder, *below[:-1])) for folder in spec.submodule_search_locations or ()]
        spec = PathFinder.find_spec(name, folders)
    if spec is None:
        raise ModuleNotFoundError(f"no module {name}; hypha-net needs libp2p 0.8.1", name=name)
    return spec


def _put(module: ModuleType) -> None:
    sys.modules[module.__name__] = module
    parent, _, child = module.__name__.rpartition(".")
    if isinstance(module, LazyPackage) and parent:
        setattr(sys.modules[parent], child, module)


def _is_probe(name: str) -> bool:
    """Whether the import system or `inspect` looks for an attribute that a module may or may not have."""
    return name.startswith("__") and name not in ("__all__", "__version__")


def _replace(found: Mapping[int, object]) -> None:
    """Put real objects in place of lazy names in the modules that took them."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").partition(".")[0] in ("libp2p", "multiaddr"):
            values = vars(module)
            values.update({key: found[id(value)] for key, value in list(values.items()) if id(value) in found})
