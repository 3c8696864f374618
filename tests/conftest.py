"""Shared fixtures: the tiny models, built once a session and only when a test needs them."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM
from tests.cli.runner import Run, make_runner
from tests.tiny_models import TinyModel, build, save_tokenizer

# Whole files go to the processes in this order: a long one that begins last would keep the others waiting.
LONGEST = (
    "test_draft_path.py",
    "test_cross_compile.py",
    "test_triton_interpreter.py",
    "test_device_path.py",
    "test_faults.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONGEST)))


@pytest.fixture(autouse=True)
def fresh_logger() -> Iterator[None]:
    """A logger remembers which levels it lets through, also while a test has patched its level: setLevel forgets."""
    yield
    logging.getLogger("nanovllm").setLevel(logging.NOTSET)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return make_runner(monkeypatch, capsys)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny matrices gain nothing from threads, and a shared machine loses a lot."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """tiny("qwen3") -> that model, with its tokenizer beside it."""
    built: dict[str, TinyModel] = {}

    def get(name: str) -> TinyModel:
        if name not in built:
            built[name] = build(name, tmp_path_factory.mktemp("models") / name)
            save_tokenizer(built[name].path)
        return built[name]

    return get


@pytest.fixture(scope="session")
def llama(tiny: Callable[[str], TinyModel]) -> TinyModel:
    """The model of all tests in which the family does not matter."""
    return tiny("llama-gqa-tied")


@pytest.fixture
def llama_copy(llama: TinyModel, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(llama.path, tmp_path / "model"))


@pytest.fixture
def make_llm(llama: TinyModel) -> Iterator[Callable[..., LLM]]:
    """make_llm(**options) -> an LLM of the tiny Llama on the CPU; all of them are closed after the test."""
    made: list[LLM] = []

    def make(model: Any = None, **options: Any) -> LLM:
        defaults = {"device": "cpu", "max_num_seqs": 16, "max_num_batched_tokens": 256, "num_kvcache_blocks": 128}
        made.append(LLM(str(model or llama.path), **{**defaults, **options}))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


@pytest.fixture(scope="module")
def llm(llama: TinyModel) -> Iterator[LLM]:
    """One engine for all tests of a file that leave it as they found it."""
    options = {"device": "cpu", "max_num_seqs": 16, "max_num_batched_tokens": 256, "num_kvcache_blocks": 256}
    with LLM(str(llama.path), **options) as made:
        yield made
        assert not made.engine.has_unfinished_requests()
        assert made.engine.scheduler.blocks.num_used == 0
