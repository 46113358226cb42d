"""Lazy imports inside py-libp2p 0.8.1: a node loads neither QUIC, ACME, mDNS nor a Kademlia DHT that it does not run.

Importing any submodule of py-libp2p executes ``libp2p/__init__.py``, which imports all transports and security
protocols. The modules that a node does run (`Swarm`, `BasicHost`, `ID`) import more, for features that are off. That is
together two thirds of the time of an import and half of its memory (docs/upstream/ has a program that shows it).

`install` puts two kinds of modules into `sys.modules` before py-libp2p is imported:

- `LazyPackage`: its ``__init__.py`` is executed at the first access to an attribute. Importing a submodule is none.
- `LazyModule`: it returns a `LazyName` for each name that py-libp2p takes from it with ``from … import``. The module is
  imported when such a name is called, or when anything else is asked of the name or of the module.

These are the semantics of PEP 810 (explicit lazy imports), for the modules named in `PACKAGES` and `MODULES`. A program
that wants all of py-libp2p in the same process gets it: ``from libp2p import new_host`` runs `restore` first.

The host is built from `BasicHost` and `Swarm`: `libp2p.new_host` is not loaded.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Final

PACKAGES: Final = ("libp2p", "libp2p.transport", "libp2p.security")
"""Packages whose ``__init__.py`` imports what no Hypha node runs, parents first."""

MODULES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "libp2p.crypto.rsa": ("RSAPrivateKey.from_bytes", "RSAPublicKey.from_bytes"),
        "libp2p.crypto.secp256k1": ("Secp256k1PrivateKey.from_bytes", "Secp256k1PublicKey.from_bytes"),
        "libp2p.discovery.mdns.mdns": ("MDNSDiscovery", "create_mdns_discovery"),
        "libp2p.metrics.swarm": ("SwarmEvent()",),
        "libp2p.rcmgr.prometheus_exporter": ("PrometheusExporter", "create_prometheus_exporter"),
        "libp2p.relay.circuit_v2.nat": ("is_private_ip",),
        "libp2p.security.pnet.protector": ("new_protected_conn",),
        "libp2p.security.tls.autotls.acme": ("ACMEClient", "compute_b36_peer_id"),
        "libp2p.security.tls.autotls.broker": ("BrokerClient",),
        "libp2p.transport.quic.stream": ("QUICStream",),
        "multiaddr.resolvers": ("DNSResolver()",),
    }
)
"""Modules that are imported for a feature which is off here, and the names that py-libp2p takes from them.

``Name.attribute`` also makes that attribute lazy. ``Name()`` also makes instances lazy: the object is created when
something of it is used.
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
        _raise_if_probe(self, name)
        restore()
        return getattr(self, name)

    def execute(self) -> None:
        """Execute ``__init__.py``; from then on this is an ordinary module."""
        spec = self.__spec__
        assert spec is not None
        assert spec.loader is not None
        self.__class__ = ModuleType  # type: ignore[assignment]  # as importlib.util.LazyLoader does
        spec.loader.exec_module(self)


class LazyModule(ModuleType):
    """A module that returns lazy names until one of them is used."""

    def __init__(self, spec: ModuleSpec, paths: tuple[str, ...]) -> None:
        super().__init__(spec.name)
        self.__spec__ = spec
        self.__package__ = spec.parent
        self.__file__ = spec.origin
        names = dict.fromkeys(path.removesuffix("()").partition(".")[0] for path in paths)
        self.names = {name: LazyName(self, name, paths) for name in names}
        self.requested: set[str] = set()
        """Lazy names that have been taken; tests compare them with those in `MODULES`."""
        self._loaded: ModuleType | None = None

    def __getattr__(self, name: str) -> Any:
        _raise_if_probe(self, name)
        if name not in self.names or self._loaded is not None:
            return getattr(self.load(), name)
        self.requested.add(name)
        return self.names[name]

    def load(self) -> ModuleType:
        """Return the real module; the first call imports it and replaces the lazy names that were taken."""
        if self._loaded is None:
            if sys.modules.get(self.__name__) is self:
                del sys.modules[self.__name__]
            module = self._loaded = importlib.import_module(self.__name__)
            _replace({id(lazy): getattr(module, name) for name, lazy in self.names.items()})
        return self._loaded


class LazyName:
    """A class or function of a module that has not been imported yet."""

    def __init__(self, module: LazyModule, path: str, lazy: tuple[str, ...]) -> None:
        self._module = module
        self._path = path
        self._lazy = lazy

    def resolve(self) -> Any:
        """Import the module and return what the name stands for."""
        found: Any = self._module.load()
        for name in self._path.split("."):
            found = getattr(found, name)
        return found

    def __getattr__(self, name: str) -> Any:
        path = f"{self._path}.{name}"
        return LazyName(self._module, path, self._lazy) if path in self._lazy else getattr(self.resolve(), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if f"{self._path}()" in self._lazy:
            return LazyInstance(self, args, kwargs)
        return self.resolve()(*args, **kwargs)

    def __instancecheck__(self, instance: object) -> bool:
        """Return false without importing the module: nothing is an instance of a class that does not exist yet."""
        return sys.modules.get(self._module.__name__) is not self._module and isinstance(instance, self.resolve())

    def __mro_entries__(self, _bases: tuple[object, ...]) -> tuple[Any, ...]:
        return (self.resolve(),)


class LazyInstance:
    """An object that is created when something of it is read; what is assigned before that is assigned to it then."""

    def __init__(self, name: LazyName, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        vars(self)["_lazy"] = (name, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if "_created" not in vars(self):
            lazy, args, kwargs = vars(self).pop("_lazy")
            created = lazy.resolve()(*args, **kwargs)
            for assigned, value in vars(self).items():
                setattr(created, assigned, value)
            vars(self)["_created"] = created
        return getattr(vars(self)["_created"], name)


def install() -> None:
    """Make py-libp2p's imports lazy. Does nothing in a process that has imported py-libp2p already."""
    if "libp2p" in sys.modules:
        return
    for name in PACKAGES:
        package = sys.modules[name] = LazyPackage(_find_spec(name))
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, package)
    for name, paths in MODULES.items():
        if name not in sys.modules:
            sys.modules[name] = LazyModule(_find_spec(name), paths)


def restore() -> None:
    """Import all that is still lazy, so that py-libp2p is as it would be without `install`."""
    for module in list(sys.modules.values()):
        if isinstance(module, LazyModule):
            module.load()
    for package in [sys.modules.get(name) for name in reversed(PACKAGES)]:
        if isinstance(package, LazyPackage):
            package.execute()


def is_installed() -> bool:
    """Return whether py-libp2p's imports are lazy in this process."""
    return isinstance(sys.modules.get("libp2p"), LazyPackage)


def _find_spec(name: str) -> ModuleSpec:
    """Find a module without importing its parents, which `importlib.util.find_spec` does.

    Raises:
        ModuleNotFoundError: there is no such module, as in another version of py-libp2p.
    """
    root, *below = name.split(".")
    spec = PathFinder.find_spec(root)
    if spec is not None and below:
        folders = [str(Path(folder, *below[:-1])) for folder in spec.submodule_search_locations or ()]
        spec = PathFinder.find_spec(name, folders)
    if spec is None:
        raise ModuleNotFoundError(f"no module {name}: hypha-net needs libp2p 0.8.1", name=name)
    return spec


def _raise_if_probe(module: ModuleType, name: str) -> None:
    """Raise `AttributeError` for the dunder names that `inspect` and the import system ask every module for."""
    if name.startswith("__") and name not in ("__all__", "__version__"):
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")


def _replace(found: Mapping[int, object]) -> None:
    """Replace lazy names, given by their `id`, in the modules that took them."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("libp2p", "multiaddr"):
            values = vars(module)
            values.update({key: found[id(value)] for key, value in list(values.items()) if id(value) in found})
