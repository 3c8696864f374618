"""The shape of the code: who may import whom, where "cuda" may be said, how long things may get.

What is checked here is read from the source with ast; nothing is imported. An exception is written down below, with its
reason, or it does not exist.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "nanovllm"
FILES = sorted(PACKAGE.rglob("*.py"))

# room -> floor. Imports go to lower floors, or stay in the room.
FLOORS = {
    "basics": 0,
    "scheduling": 1,
    "hardware": 1,
    "telemetry": 2,
    "ops": 2,
    "weights": 2,
    "attention": 3,
    "sampling": 3,
    "memory": 3,
    "lowrank": 3,
    "layers": 4,
    "moe": 4,
    "models": 5,
    "runner": 6,
    "ranks": 7,
    "engine": 8,
    "llm": 8,
    "server": 9,
    "cli": 10,
    "bench": 10,
    "lowrank.compress": 10,
}
BASICS = {"__init__", "config", "errors", "sampling_params", "outputs", "model_config", "quantization_config"}
# Within one floor: (from, to)
NEIGHBOURS = {
    ("llm", "engine"),  # llm.py is the front door of the engine
    ("moe", "layers"),
    ("cli", "bench"),
    ("cli", "lowrank.compress"),  # commands
    ("bench", "lowrank.compress"),  # a model over windows of text, without an engine
}
LAZY = {"__init__.py"}  # finds LLM and the engines on first use, so it names modules above it

CUDA_ROOMS = ("hardware/", "ops/triton/", "attention/flash")
CUDA_EXCEPTIONS = {"config.py": 1}  # the list of device names a user may write

MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8
MAX_OPERATOR_PARAMETERS = 11  # in ops/: an operator takes its tensors one by one and knows no records of the engine
MAX_FILE_LINES = 450
ONE_HOUR = (
    "scheduling/sequence.py",
    "scheduling/block_manager.py",
    "scheduling/policy.py",
    "scheduling/plan.py",
    "scheduling/scheduler.py",
    "engine/llm_engine.py",
    "models/transformer.py",
    "models/llama.py",
    "layers/attention.py",
)


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def module_of(path: Path) -> str:
    return name_of(path).removesuffix(".py").replace("/", ".")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def room_of(module: str) -> str:
    """`scheduling.plan` -> scheduling, `config` -> basics."""
    first = module.split(".")[0]
    first = {"LLM": "llm", "LLMEngine": "engine", "AsyncLLMEngine": "engine"}.get(first, first)  # names of the package
    known = (PACKAGE / first).is_dir() or (PACKAGE / f"{first}.py").is_file()
    if first in BASICS or not known:
        return "basics"
    inner = ".".join(module.split(".")[:2])  # lowrank.compress: a room inside a room
    return "cli" if first == "__main__" else inner if inner in FLOORS else first


def imports_of(tree: ast.Module) -> Iterator[str]:
    """Every module named by an import anywhere in the file, inside functions and under TYPE_CHECKING too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the room"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(path: Path) -> Iterator[str]:
    yield from (
        name.removeprefix("nanovllm").removeprefix(".")
        for name in imports_of(tree_of(path))
        if name.split(".")[0] == "nanovllm"
    )


each_file = pytest.mark.parametrize("path", FILES, ids=name_of)


def test_there_is_something_to_check() -> None:
    assert len(FILES) > 50


@each_file
def test_imports_go_down(path: Path) -> None:
    if name_of(path) in LAZY:
        return
    here = room_of(module_of(path))
    assert here in FLOORS, f"{name_of(path)}: a new room needs a floor in this test"
    for module in own_imports(path):
        there = room_of(module)
        allowed = there == here or FLOORS[there] < FLOORS[here] or (here, there) in NEIGHBOURS
        assert allowed, f"{name_of(path)} ({here}) imports nanovllm.{module} ({there})"


TORCH = {"torch", "triton", "numpy", "transformers", "safetensors", "gguf"}
# Decisions too: simulated in tests, and made before anything is loaded.
TORCH_FREE = ("moe/offload/cache.py", "moe/balance.py")
ROOMS_OF_DECISIONS = ("basics", "scheduling", "memory")
ONLY_STDLIB = [p for p in FILES if room_of(module_of(p)) in ROOMS_OF_DECISIONS or name_of(p) in TORCH_FREE]


@pytest.mark.parametrize("path", ONLY_STDLIB, ids=name_of)
def test_decisions_need_no_torch(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports_of(tree_of(path))} & TORCH


def test_servers_and_clusters_are_extras() -> None:
    extras = {"fastapi", "uvicorn", "starlette", "ray", "aiohttp", "pydantic"}
    for path in FILES:
        if room_of(module_of(path)) != "server":
            found = {name.split(".")[0] for name in imports_of(tree_of(path))} & extras
            assert not found or name_of(path).startswith("ranks/ray"), f"{name_of(path)}: {found}"


def docstrings_of(tree: ast.Module) -> set[ast.AST]:
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, owners) and node.body and isinstance(node.body[0], ast.Expr)
    }


def says_cuda(tree: ast.Module) -> list[int]:
    """Lines with "cuda" as (part of) a string or as a name: `torch.cuda`, `x.cuda()`, `from torch import cuda`."""
    docstrings = docstrings_of(tree)
    lines = []
    for node in ast.walk(tree):
        text: object = None
        if isinstance(node, ast.Constant) and node not in docstrings:
            text = node.value
        elif isinstance(node, ast.Attribute):
            text = node.attr if node.attr == "cuda" else None
        elif isinstance(node, ast.alias):
            text = node.name if "cuda" in node.name.split(".") else None
        if isinstance(text, str) and re.search(r"\bcuda\b", text):
            lines.append(node.lineno)
    return lines


@each_file
def test_devices_have_one_door(path: Path) -> None:
    if name_of(path).startswith(CUDA_ROOMS):
        return
    lines = says_cuda(tree_of(path))
    assert len(lines) <= CUDA_EXCEPTIONS.get(name_of(path), 0), f"{name_of(path)}: cuda in lines {lines}"


def reaches_inside(tree: ast.Module) -> list[str]:
    """What a command or a benchmark must not touch: of an executor all but `probe()` (runner/probe.py), a runner, the
    modules of a model, and private names of others."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            of_executor = owner.split(".")[-1] == "executor" and node.attr != "probe"
            private = re.match(r"_[^_]", node.attr) and owner not in ("self", "cls", "os")
            if of_executor or private or node.attr in ("runner", "offload", "modules", "named_parameters"):
                found.append(f"line {node.lineno}: {owner}.{node.attr}")
    return found


COMMANDS = [path for path in FILES if room_of(module_of(path)) in ("bench", "cli")]


@pytest.mark.parametrize("path", COMMANDS, ids=name_of)
def test_commands_and_benchmarks_use_public_interfaces(path: Path) -> None:
    assert reaches_inside(tree_of(path)) == []


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A Triton kernel's signature is its calling convention: one name per pointer, size and stride."""
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def functions_of(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (n for n in ast.walk(tree_of(path)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))


LONG_KERNELS = {  # "file:function" -> lines
    "ops/triton/decode_attention.py:decode_kernel": 70,  # one pass over the keys; its arguments alone are nine lines
    "ops/triton/mla_decode.py:latent_decode_kernel": 75,  # likewise; of its arguments there are 26
    "ops/triton/prefill_attention.py:prefill_kernel": 75,  # its passes over the keys share twenty values
}


@each_file
def test_functions_are_short(path: Path) -> None:
    for node in functions_of(path):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        limit = LONG_KERNELS.get(f"{name_of(path)}:{node.name}", MAX_FUNCTION_LINES)
        assert lines <= limit, f"{name_of(path)}:{node.lineno} {node.name} has {lines} lines, the limit is {limit}"


@each_file
def test_functions_have_few_parameters(path: Path) -> None:
    for node in functions_of(path):
        names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        count = len([name for name in names if name not in ("self", "cls")])
        limit = MAX_OPERATOR_PARAMETERS if name_of(path).startswith("ops/") else MAX_PARAMETERS
        assert count <= limit or is_kernel(node), f"{name_of(path)}:{node.lineno} {node.name} has {count} parameters"


@each_file
def test_files_are_short_and_begin_with_their_contract(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_FILE_LINES
    assert not text or ast.get_docstring(tree_of(path)), f"{name_of(path)}: no docstring"


@each_file
def test_nothing_unpickles_or_runs_code_of_a_model(path: Path) -> None:
    imported = {name.split(".")[0] for name in imports_of(tree_of(path))}
    assert not imported & {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("torch.load", "eval", "exec", "os.system"), f"{name_of(path)}:{node.lineno} {called}"
            for keyword in node.keywords:
                if keyword.arg == "trust_remote_code":
                    assert isinstance(keyword.value, ast.Constant)
                    assert keyword.value.value is False
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values):
                if isinstance(key, ast.Constant) and key.value == "trust_remote_code":
                    assert isinstance(value, ast.Constant)
                    assert value.value is False


@each_file
def test_no_state_outside_objects(path: Path) -> None:
    """No `global`, and no module variable that could be one (a bare lower-case name set at the top)."""
    for node in ast.walk(tree_of(path)):
        assert not isinstance(node, ast.Global), f"{name_of(path)}:{node.lineno} global"
    for node in tree_of(path).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, (ast.List, ast.Dict, ast.Set)):
            for target in node.targets:
                name = ast.unparse(target)
                assert name.isupper() or name == "__all__", f"{name_of(path)}:{node.lineno} {name}"


NAMES = {
    "llm.py": {"LLM"},
    "sampling_params.py": {"SamplingParams"},
    "config.py": {"EngineConfig"},
    "outputs.py": {"RequestOutput", "CompletionOutput", "Logprob"},
    "scheduling/sequence.py": {"Sequence"},
    "scheduling/block_manager.py": {"BlockManager"},
    "scheduling/scheduler.py": {"Scheduler"},
    "scheduling/plan.py": {"StepPlan", "PlanEntry"},
    "engine/llm_engine.py": {"LLMEngine"},
    "engine/async_engine.py": {"AsyncLLMEngine"},
    "engine/detokenizer.py": {"Detokenizer"},
    "runner/model_runner.py": {"ModelRunner"},
    "runner/kv_cache.py": {"CacheLayout"},
    "attention/base.py": {"AttentionBackend"},
    "layers/linear.py": {"ColumnParallelLinear", "RowParallelLinear", "QKVParallelLinear"},
    "layers/attention.py": {"Attention"},
    "models/transformer.py": {"Transformer"},
    "moe/layer.py": {"MoeLayer"},
    "moe/resident.py": {"ResidentExperts"},
    "hardware/device.py": {"Device"},
}


@pytest.mark.parametrize("file", NAMES)
def test_known_names_are_where_people_look(file: str) -> None:
    classes = {node.name for node in tree_of(PACKAGE / file).body if isinstance(node, ast.ClassDef)}
    assert NAMES[file] <= classes


# Folders of tests that are no room: what needs a card or a browser, what runs whole engines, and shared files.
ACROSS = {"gpu", "browser", "parity", "simulation", "learn", "fixtures"}


def test_tests_mirror_the_rooms() -> None:
    folders = {path.name for path in Path(__file__).parent.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders - ACROSS <= {name for name in FLOORS if (PACKAGE / name).is_dir()}


def test_reasons_are_in_the_repository() -> None:
    """A comment gives its reason, not the number of a list that a reader does not have."""
    for path in (*FILES, *Path(__file__).parent.rglob("*.py")):
        assert not re.search(r"\blessons? \d", path.read_text(encoding="utf-8"), re.IGNORECASE), path


def test_a_public_class_name_exists_once() -> None:
    places: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(name_of(path))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


MAX_SKIPS = 80  # tables, and the signatures and launches of kernels


def test_the_formatter_runs_on_everything() -> None:
    tests = sorted(Path(__file__).parent.rglob("*.py"))
    skips = sum(path.read_text(encoding="utf-8").count("  # fmt: " + "skip\n") for path in (*FILES, *tests))
    assert skips <= MAX_SKIPS


def test_the_core_reads_in_an_hour() -> None:
    lines = {file: len((PACKAGE / file).read_text(encoding="utf-8").splitlines()) for file in ONE_HOUR}
    assert sum(lines.values()) <= 1500, lines


def test_the_words_of_the_family_stay() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in FILES)
    for word in ("block_table", "num_computed", "slots"):
        assert word in text


def test_the_checks_can_fail() -> None:
    """Each reader above finds what it looks for in a file made of nothing but offences."""
    bad = ast.parse(
        "import torch.cuda\nfrom nanovllm.engine.llm_engine import LLMEngine\nimport pickle\n"
        "def f(x):\n    'docs may say cuda'\n    from nanovllm.llm import LLM\n"
        "    return x.cuda(), torch.device('cuda:0'), 'recudas'\n"
    )
    assert says_cuda(bad) == [1, 7, 7]
    assert {name.split(".")[0] for name in imports_of(bad)} == {"torch", "nanovllm", "pickle"}
    inside = ast.parse("e.executor.probe().device, e.executor.layout, r.runner, x.model.modules(), e._flights, self._a")
    assert len(reaches_inside(inside)) == 4
    assert [room_of(m) for m in ("engine.llm_engine.LLMEngine", "llm", "cli.stream", "config", "ops.triton.norm")] == [
        "engine",
        "llm",
        "cli",
        "basics",
        "ops",
    ]
