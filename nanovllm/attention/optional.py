"""Packages that a backend may use but that need not be installed.

`load(name)` gives the module, or says in words why there is none. The import is really tried: a package compiled
for another version of torch is found by name and then fails on its first symbol.
"""

from __future__ import annotations

import importlib
from types import ModuleType


def load(name: str) -> ModuleType | str:
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name in (name, package):
            return f"{package} is not installed"
        return f"{package} is installed but cannot be imported: {error}"
    except (ImportError, OSError, RuntimeError) as error:
        return f"{package} is installed but cannot be imported: {error}"


def major_version(module: ModuleType) -> int:
    first = str(getattr(module, "__version__", "")).partition(".")[0]
    return int(first) if first.isdigit() else 0
