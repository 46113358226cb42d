"""Defers importing torch's compiler until something asks for it.

Every optimizer imports ``torch._dynamo`` with its first call, and transformers does for its attention masks. It is
among the longest imports of a process that trains, and here nothing is compiled unless a model's own code does it.
Called before transformers is imported and before an optimizer is created.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any, Final

_NAME: Final = "torch._dynamo"
_ALONE: Final = f"{_NAME}._trace_wrapped_higher_order_op"
"""Module that transformers imports for its attention masks; it needs nothing else of the package."""
_METHODS: Final = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
"""Methods of optimizers that torch keeps out of what it compiles, for which it imports the compiler."""
_KEPT_OUT: Final = "__dynamo_disable"
"""Attribute at which torch looks for the version of such a method that the compiler does not enter."""
_LOCK: Final = threading.RLock()
_TESTED: Final = "2.15."
"""Versions of torch with which this was tested; others import their compiler as they do."""


class DeferredPackage(ModuleType):
    """The package: its ``__init__.py`` is executed in place when an attribute is read that it does not have yet.

    What is asked of it at the import of transformers, and by optimizers, it does itself.
    """

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec.name)
        self.__spec__ = spec
        self.__package__ = spec.name
        self.__loader__ = spec.loader
        self.__file__ = spec.origin
        self.__path__ = list(spec.submodule_search_locations or ())
        self._allowed: list[Any] = []

    def graph_break(self, msg: str = "") -> None:
        """Do nothing, which is what it does in code that is not being compiled; optimizers call it at each step."""

    def disable(self, fn: Any = None, *arguments: Any, **settings: Any) -> Any:
        """Return a function that the compiler does not enter; the compiler is asked for it when it is there.

        Called at the import of modules whose functions are decorated with ``torch.compiler.disable``.
        """
        if fn is None:
            return lambda function: self.disable(function, *arguments, **settings)
        if not isinstance(fn, FunctionType):
            self.execute()
            return self.disable(fn, *arguments, **settings)
        disabled: list[Callable[..., Any]] = []

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            if type(self) is DeferredPackage:
                return fn(*args, **kwargs)
            if not disabled:
                disabled.append(self.disable(fn, *arguments, **settings))
            return disabled[0](*args, **kwargs)

        return call

    def assume_constant_result(self, fn: Any) -> Any:
        """Mark a function whose result the compiler takes for a constant, as the package itself does."""
        fn._dynamo_marked_constant = True
        return fn

    def allow_in_graph(self, fn: Any) -> Any:
        """Note a function that the compiler does not look into; it is told when it is there."""
        self._allowed.append(fn)
        return fn

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked of every module by `inspect` and by the import system
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.execute()
        return getattr(self, name)

    def execute(self) -> None:
        """Execute ``__init__.py``; from then on this is an ordinary module."""
        with _LOCK:
            if type(self) is not DeferredPackage:
                return
            spec = self.__spec__
            assert spec is not None
            assert spec.loader is not None
            sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, _Submodules)]
            self.__class__ = ModuleType  # type: ignore[assignment]  # as importlib.util.LazyLoader does
            spec.loader.exec_module(self)
            for function in self._allowed:
                self.allow_in_graph(function)


class _Submodules(MetaPathFinder):
    """Executes the package before another module than `_ALONE` is imported from it."""

    def __init__(self, package: DeferredPackage) -> None:
        self._package = package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{_NAME}.") or fullname == _ALONE:
            return None
        self._package.execute()
        imported = sys.modules.get(fullname)  # by the package itself: it must not be imported twice
        return None if imported is None else ModuleSpec(fullname, _Imported(imported))


class _Imported(Loader):
    """Returns a module that has been imported meanwhile."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has replaced it


def defer_compiler() -> None:
    """Import torch, and its compiler only when it is used.

    It is not deferred if it was imported already, with an untested version of torch, or where models are likely to be
    compiled: on machines with an accelerator.
    """
    import torch

    if _NAME in sys.modules or not torch.__version__.startswith(_TESTED) or torch.accelerator.is_available():
        return
    spec = importlib.util.find_spec(_NAME)
    if spec is None:
        return
    package = sys.modules[_NAME] = DeferredPackage(spec)
    torch._dynamo = package
    sys.meta_path.insert(0, _Submodules(package))
    for name in _METHODS:
        method = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
        if method is not None:
            vars(method).setdefault(_KEPT_OUT, method)
