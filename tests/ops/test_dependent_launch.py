"""Kernels that let the next one start early wait themselves, and write nothing before. Triton's interpreter runs one
kernel after the other and could not see it; on a card it would be a wrong answer now and then."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

import nanovllm

FILES = sorted((Path(nanovllm.__file__).parent / "ops" / "triton").glob("*.py"))
START, WAIT = "start_next", "wait_for_last"
WRITES = ("store", "atomic_add", "atomic_max", "atomic_cas", "atomic_xchg")


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def calls_of(function: ast.FunctionDef) -> list[tuple[int, str]]:
    """(line, name) in the order of lines."""
    return sorted((node.lineno, name_of(node)) for node in ast.walk(function) if isinstance(node, ast.Call))


FUNCTIONS = [
    node
    for path in FILES
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(mark) for mark in node.decorator_list)
]
CALLS = {node.name: calls_of(node) for node in FUNCTIONS}
WAITING = {name for name, calls in CALLS.items() if any(called == WAIT for _, called in calls)}
STARTING = sorted(name for name, calls in CALLS.items() if any(called == START for _, called in calls))


def test_they_were_found() -> None:
    names = Counter(node.name for node in FUNCTIONS if any(called == START for _, called in calls_of(node)))
    assert len(names) > 20
    assert set(names.values()) == {1}, "of two kernels with one name only one is checked"
    assert {"gemv_kernel", "matmul_kernel", "norm_kernel", "integer_gemv_kernel"} <= set(STARTING)


@pytest.mark.parametrize("name", STARTING)
def test_a_kernel_waits_before_it_writes(name: str) -> None:
    first = next((line for line, called in CALLS[name] if called == WAIT or called in WAITING), None)
    assert first is not None, f"{name} never waits for the kernel before it"
    early = [line for line, called in CALLS[name] if called in WRITES and line < first]
    assert not early, f"{name} writes before it waits, in lines {early}"


def test_who_waits_also_lets_the_next_one_start() -> None:
    """Or is a function of one that does: the next kernel would begin late, as everywhere before."""
    helpers = {called for name in STARTING for _, called in CALLS[name]}
    assert set(STARTING) | helpers >= WAITING
