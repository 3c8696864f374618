"""A command imports torch by `import_torch`, before anything that imports it: Ctrl-C within is lost otherwise."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import nanovllm

FOLDER = Path(nanovllm.__file__).parent / "cli"
# Without torch, so what imports it fails: much faster than to import it
PROBE = """
import importlib, json, sys
class NoTorch:
    asked = False
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            NoTorch.asked = True
            raise ImportError("torch")
sys.meta_path.insert(0, NoTorch())
found = []
for name in json.loads(sys.argv[1]):
    NoTorch.asked = False
    try:
        importlib.import_module(name)
    except ImportError:
        pass
    if NoTorch.asked:
        found.append(name)
    for known in [known for known in sys.modules if known.startswith("nanovllm")]:
        del sys.modules[known]
print(json.dumps(found))
"""
Function = ast.FunctionDef
Imports = list[tuple[str, str, int, Function]]  # file, module, line, function


def local_imports() -> Imports:
    """Of this package, inside functions."""
    found: Imports = []
    for path in sorted(FOLDER.glob("*.py")):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(function, Function):
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith("nanovllm"):
                    found += [(path.name, name_of(node, alias.name), node.lineno, function) for alias in node.names]
                elif isinstance(node, ast.Import) and any(alias.name == "torch" for alias in node.names):
                    found.append((path.name, "torch", node.lineno, function))
    return found


def name_of(node: ast.ImportFrom, name: str) -> str:
    inner = f"{node.module}.{name}"
    is_module = (FOLDER.parents[1] / f"{inner.replace('.', '/')}.py").is_file()
    return inner if is_module else str(node.module)


def calls(function: Function, name: str) -> list[int]:
    found = (node for node in ast.walk(function) if isinstance(node, ast.Call))
    return [node.lineno for node in found if isinstance(node.func, ast.Name) and node.func.id == name]


@pytest.fixture(scope="module")
def with_torch() -> Imports:
    found = local_imports()
    names = sorted({name for _, name, _, _ in found})
    done = subprocess.run([sys.executable, "-c", PROBE, json.dumps(names)], capture_output=True, text=True, check=True)
    heavy = set(json.loads(done.stdout)) | {"torch"}
    assert {"nanovllm.engine.llm_engine", "nanovllm.bench.quality"} <= heavy
    assert "nanovllm.bench.report" not in heavy
    return [entry for entry in found if entry[1] in heavy]


def test_torch_is_imported_by_the_function_for_it(with_torch: Imports) -> None:
    for file, name, line, function in with_torch:
        before = [at for at in calls(function, "import_torch") if at < line]
        assert before, f"{file}:{line}, {function.name}: {name} imports torch; call import_torch() before"
