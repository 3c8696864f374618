"""RankGroup: processes that run tests/ranks/rank.py, connected over gloo; each job is done by all of them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from nanovllm.hardware.parallel import open_store

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("rank.py")
SECONDS = 120


class RankGroup:
    def __init__(self, size: int) -> None:
        self.size, self._store = size, open_store(0, size, is_master=True, timeout=60)  # port 0: any free one
        self._ranks = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), str(rank), str(size), str(self._store.port)],
                text=True,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={"PYTHONPATH": str(ROOT), "PATH": ""},
            )
            for rank in range(size)
        ]

    def do(self, **job: Any) -> list[dict[str, Any]]:
        """What each rank has printed."""
        limit = threading.Timer(SECONDS, self.close)  # a rank that hangs ends the test, not the suite
        limit.start()
        try:
            for rank in self._ranks:
                assert rank.stdin is not None
                rank.stdin.write(json.dumps(job) + "\n")
                rank.stdin.flush()
            lines = [rank.stdout.readline() for rank in self._ranks]  # type: ignore[union-attr]
        finally:
            limit.cancel()
        assert all(lines), f"{job}: a rank ended: {[rank.poll() for rank in self._ranks]}"
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.wait()
