"""How long one user waits: to the first token, between tokens, and from an empty process to the first token.

Requests run one at a time: this is the floor that batching adds to. Start-up is measured from outside, in a new
process, because inside one everything is already imported, mapped and warm.
"""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
import time
from itertools import pairwise
from typing import Any

from tqdm import tqdm

from nanovllm.bench.report import summary
from nanovllm.bench.workload import WorkloadShape
from nanovllm.config import EngineConfig
from nanovllm.errors import EngineDeadError
from nanovllm.sampling_params import SamplingParams


def measure_requests(engine: Any, shape: WorkloadShape, temperature: float, seed: int) -> dict[str, Any]:
    """Seconds; `between` are the gaps between any two tokens, `per_token` their mean over each request."""
    waits, gaps, means = [], [], []
    workload = shape.draw(seed, engine.model_config.vocab_size)
    requests = list(enumerate(zip(workload.prompts, workload.output_lens)))
    for index, (prompt, length) in tqdm(requests, desc="one at a time", unit="request", disable=None, leave=False):
        params = SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True)
        started = time.perf_counter()
        engine.add_request(f"latency-{index}", {"prompt_token_ids": prompt}, params)
        times = []
        while engine.has_unfinished_requests():
            for delta in engine.step():
                times += [time.perf_counter()] * len(delta.outputs[0].token_ids)
        waits.append(times[0] - started)
        gaps += [after - before for before, after in pairwise(times)]
        if len(times) > 1:
            means.append((times[-1] - times[0]) / (len(times) - 1))
    found = {"time_to_first_token": summary(waits)}
    if gaps:
        found |= {"time_per_output_token": summary(means), "between_tokens": summary(gaps)}
    return found


def measure_startup(config: EngineConfig, repeat: int) -> dict[str, Any]:
    """Process start to first token, with the parts that the child saw."""
    seconds, parts = [], {}
    code = "from nanovllm.bench.latency import first_token; first_token()"
    for _ in tqdm(range(repeat), desc="starting processes", unit="process", disable=None, leave=False):
        started = time.perf_counter()
        with subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdin
            assert child.stdout
            child.stdin.write(json.dumps(dataclasses.asdict(config)))
            child.stdin.close()
            line = child.stdout.readline()  # written with the first token; taking the engine down again is not counted
            seconds.append(time.perf_counter() - started)
        if child.returncode or not line:
            raise EngineDeadError(
                f"start-up: the child process ended with code {child.returncode}; see its message above"
            )
        parts = json.loads(line)
    return {**summary(seconds), "last": parts}


def first_token() -> None:
    """The child: import, load, one token, leave. Its config comes on stdin."""
    config = EngineConfig(**json.load(sys.stdin))
    started = time.perf_counter()
    from nanovllm.engine.llm_engine import LLMEngine

    imported = time.perf_counter()
    engine = LLMEngine(config)
    loaded = time.perf_counter()
    prompt = [random.Random(0).randrange(engine.model_config.vocab_size) for _ in range(16)]
    engine.add_request("first", {"prompt_token_ids": prompt}, SamplingParams(max_tokens=1, temperature=0.0))
    while engine.has_unfinished_requests():
        engine.step()
    answered = time.perf_counter()
    print(json.dumps({"import": imported - started, "load": loaded - imported, "token": answered - loaded}), flush=True)
