"""Makes the import of transformers read the files of its models once.

Transformers reads all of its 2200 modules for their ``__all__``, twice: it remembers 128 of 550 folders, and splits
each module into lines to find the last of them that begins with ``__all__``. That is half of its import.
"""

from __future__ import annotations

import functools
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType
from typing import Any, Final

_MODULE: Final = "transformers.utils.import_utils"
_NAME: Final = "__all__"


def scan_quickly() -> None:
    """Change what reads the modules, before transformers is imported; does nothing afterwards."""
    if "transformers" not in sys.modules and not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def find_exports(original: Callable[[str], list[str]], content: str) -> list[str]:
    """Return what the function of transformers returns, which is given the end of the module only."""
    found = content.find(_NAME)
    return [] if found < 0 else original(content[content.rfind("\n", 0, found) + 1 :])


class _Finder(MetaPathFinder):
    """Finds the module that reads the others, once, with a loader that changes it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        scan: Any = getattr(module, "create_import_structure_from_path", None)
        if hasattr(scan, "cache_info"):
            vars(module)["create_import_structure_from_path"] = functools.cache(scan.__wrapped__)
        exports = getattr(module, "fetch__all__", None)
        if exports is not None:
            vars(module)["fetch__all__"] = functools.partial(find_exports, exports)
