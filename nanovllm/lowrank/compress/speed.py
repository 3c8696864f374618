"""Tokens a second, measured: a short real generation through the engine, with a model's own experts or low-rank ones.

One sequence, greedy, on the device at hand, with the engine's default placement of experts: where all of them fit, that
is resident. It says what this machine does, and no more; the aims for offloaded experts need a GPU
(tests/gpu/check_low_rank.py). The engine looks for low-rank experts beside the model, so the model is seen through a
folder of links that has them there, and nothing is written into its own.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nanovllm.errors import ModelError
from nanovllm.lowrank.compress.text import low_rank_allowed
from nanovllm.lowrank.folder import FOLDER

PROMPT_TOKENS, WARM_UP_TOKENS, RUNS = 32, 8, 3


@dataclass(frozen=True)
class MeasuredSpeed:
    tokens_per_second: float  # the median of RUNS generations
    num_tokens: int  # of each
    device: str
    dtype: str
    placement: str


@contextmanager
def seen_with(model_path: Path, folder: Path) -> Iterator[Path]:
    """The model as if `folder` were its low-rank experts."""
    if not model_path.is_dir():
        raise ModelError(f"{model_path}: a single file has no folder where the engine would find low-rank experts")
    with tempfile.TemporaryDirectory(prefix="nanovllm-speed-") as place:
        for path in model_path.iterdir():
            if not path.name.startswith(FOLDER):
                os.symlink(path.resolve(), Path(place) / path.name)
        os.symlink(folder.resolve(), Path(place) / FOLDER)
        yield Path(place)


def measure_speed(
    model_path: Path, folder: Path | None, prompt: list[int], num_tokens: int, device: str
) -> MeasuredSpeed:
    """`folder`: low-rank experts; None: the model's own."""
    if folder is None:
        with low_rank_allowed(False):
            return _generate(model_path, prompt, num_tokens, device)
    with low_rank_allowed(True), seen_with(Path(model_path), folder) as seen:
        return _generate(seen, prompt, num_tokens, device)


def _generate(model_path: Path, prompt: list[int], num_tokens: int, device: str) -> MeasuredSpeed:
    from nanovllm.llm import LLM
    from nanovllm.sampling_params import SamplingParams

    length = len(prompt) + max(num_tokens, WARM_UP_TOKENS)
    options = {"device": device, "max_num_seqs": 1, "max_model_len": length, "enable_prefix_caching": False}
    with LLM(str(model_path), **options) as llm:
        rates = []
        for run in range(1 + RUNS):
            count = num_tokens if run else WARM_UP_TOKENS
            params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            started = time.perf_counter()
            llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
            rates.append(count / (time.perf_counter() - started))
        facts = llm.engine.describe()["runs_on"]
    placement = facts.get("experts", {}).get("placement", "resident")
    return MeasuredSpeed(statistics.median(rates[1:]), num_tokens, facts["device"], facts["dtype"], placement)
