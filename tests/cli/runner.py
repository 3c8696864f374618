"""The `nanovllm` command run in this process: a new one would spend seconds importing torch."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from nanovllm.cli import main

SMALL = ("--device", "cpu", "--max-num-seqs", "8", "--num-kvcache-blocks", "64", "--max-num-batched-tokens", "64")


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def last_json(self) -> Any:
        return json.loads(self.out.splitlines()[-1])


Run = Callable[..., Result]


def make_runner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("NANOVLLM_DEBUG", raising=False)

    def run(*args: Any, stdin: str = "") -> Result:
        monkeypatch.setattr(sys, "argv", ["nanovllm", *map(str, args)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        captured = capsys.readouterr()
        return Result(int(left.value.code or 0), captured.out, captured.err)

    return run
