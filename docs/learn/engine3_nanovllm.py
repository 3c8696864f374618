"""Engine 3: the same requests in nano-vLLM, step by step, with the place in the code for every idea of engines 1 and 2.

    python docs/learn/engine3_nanovllm.py
    python docs/learn/engine3_nanovllm.py --no-prefix-caching        (engine 2's steps, in nano-vLLM)
    python docs/learn/engine3_nanovllm.py --num-blocks 9             (too few blocks for all: requests are preempted)

The loop is the one of engine 2: schedule, compute, commit. It is in `engine/llm_engine.py:LLMEngine.step`. What is new:

    prefix cache    blocks are found by content, so a beginning that was computed before is not computed again. In the
                    printout: request 0 asks first, request 6 asks the same and feeds 5 tokens instead of 37.
    plans           the scheduler writes down a step as integers; the runner turns them into tensors and never sees a
                    sequence. So a plan can be printed (below), sent to another process, or tested without a model.
    fewer calls     q, k and v are one matrix, gate and up too; norms, rotation with the store into the cache, and
                    decode attention are one C function each (on a GPU: one Triton kernel each), where engine 2 makes
                    dozens of calls of PyTorch. Attention reads the cache in place instead of gathering it.
    products        PyTorch's x @ W.T is slow for 4 to 48 rows on a CPU; `ops/linear.py:linear` computes W @ x.T there.

Read the places below in their order; then docs/tour.md follows one request through all of them.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from engine1_plain import Request, Run, read_arguments, report

from nanovllm.config import EngineConfig
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.ranks.contract import Executor
from nanovllm.runner.model_runner import InFlight
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduling.plan import StepPlan


class Place(NamedTuple):
    idea: str  # in engine 1 or 2
    ours: str  # file:name inside nanovllm/
    differs: str


PLACES = [
    Place("engine2_paged.py:run", "engine/llm_engine.py:LLMEngine.step", "several steps may be in flight on a GPU"),
    Place("engine2_paged.py:Sequence", "scheduling/sequence.py:Sequence", "a third counter, for tokens not known yet"),
    Place(
        "engine2_paged.py:Scheduler.schedule", "scheduling/scheduler.py:Scheduler.schedule", "policies, prefix cache"
    ),
    Place("engine2_paged.py:Scheduler.make_room", "scheduling/scheduler.py:Scheduler._make_room", "the same rule"),
    Place("engine2_paged.py:Scheduler.commit", "scheduling/scheduler.py:Scheduler.commit", "stop strings, logprobs"),
    Place("engine2_paged.py:blocks_for", "scheduling/block_manager.py:BlockManager.reserve", "prefers neighbours"),
    Place("engine2_paged.py:Scheduler.release", "scheduling/block_manager.py:BlockManager.release", "content is kept"),
    Place("engine2_paged.py:Plan", "scheduling/plan.py:StepPlan", "integers only, and only what is new"),
    Place("engine2_paged.py:Cache", "runner/kv_cache.py:allocate", "as many blocks as memory allows"),
    Place("engine2_paged.py:forward", "runner/input_batch.py:InputBatch.inputs", "slots, positions, rows: flat arrays"),
    Place("engine1_plain.py:load", "weights/loader.py:load_weights", "proves that every parameter was filled"),
    Place("engine1_plain.py:forward", "models/transformer.py:Transformer.forward", "one class for all families"),
    Place("engine1_plain.py:rms_norm", "ops/norm.py:add_rms_norm", "adds the residual in the same call"),
    Place("engine1_plain.py:rotate", "ops/qk_norm_rope.py:qk_norm_rope", "also stores k and v into their slots"),
    Place("engine1_plain.py:project", "layers/attention.py:Attention.forward", "q, k and v in one matrix product"),
    Place("engine1_plain.py:attend", "ops/attention.py:paged_attention_reference", "what every backend must compute"),
    Place("engine1_plain.py:attend", "attention/native_backend.py:NativeBackend", "what runs on a CPU"),
    Place("engine1_plain.py:mlp", "layers/mlp.py:GatedMLP", "gate and up in one matrix product"),
    Place("engine1_plain.py:run", "sampling/sampler.py:sample", "argmax is one of many ways to choose a token"),
]


def make_engine(num_blocks: int = 64, budget: int = 64, max_num_seqs: int = 8, prefixes: bool = True) -> LLMEngine:
    """The sizes of engine 2, and weights and numbers in 32 bits on a CPU: then the tokens are equal."""
    return LLMEngine(
        EngineConfig(
            device="cpu",
            dtype="float32",
            quantization="none",
            kvcache_block_size=16,
            num_kvcache_blocks=num_blocks,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            max_model_len=512,
            enable_prefix_caching=prefixes,
        )
    )


class Recorder:
    """Stands in for the engine's executor: counts and describes every plan before it is computed."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.num_passes = self.num_rows = 0
        self.lines: list[str] = []  # printed by `run`: an error in here would count as a failed step

    def __getattr__(self, name: str) -> object:
        return getattr(self.executor, name)

    def launch(self, plan: StepPlan) -> InFlight:
        self.num_passes += 1
        self.num_rows += plan.num_tokens
        parts = []
        for entry in plan.entries:
            end = entry.start + entry.num_new - 1
            fed = f"{end}" if entry.num_new == 1 else f"{entry.start}..{end}"
            blocks = f" +blocks {','.join(map(str, entry.block_ids))}" if entry.block_ids else ""
            parts.append(f"{entry.seq_id}[{fed}{blocks}]")
        self.lines.append(f"step {plan.step_id:2}, {plan.num_tokens:2} tokens: {' '.join(parts)}")
        return self.executor.launch(plan)


def run(engine: LLMEngine, requests: list[Request], show: Callable[[str], None] = lambda line: None) -> Run:
    chats = [[{"role": "user", "content": request.question}] for request in requests]
    prompts = [engine.inputs.render_chat(chat) for chat in chats]
    engine.reset_prefix_cache()  # of an earlier run
    started = time.perf_counter()
    executor = engine.executor
    engine.executor = recorder = Recorder(executor)
    outputs: list[list[int]] = [[] for _ in requests]
    coming = deque(sorted(range(len(requests)), key=lambda i: requests[i].arrives))
    step = 0
    while coming or engine.has_unfinished_requests():
        while coming and requests[coming[0]].arrives <= step:
            number = coming.popleft()
            params = SamplingParams(temperature=0, max_tokens=requests[number].max_tokens)
            engine.add_request(str(number), prompts[number], params)
        step += 1
        for delta in engine.step():  # what is new of each request that moved
            outputs[int(delta.request_id)] += delta.outputs[0].token_ids
        while recorder.lines:
            show(recorder.lines.pop(0))
    engine.executor = executor
    return Run(outputs, recorder.num_passes, recorder.num_rows, time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description="Engine 3: nano-vLLM, step by step.")
    parser.add_argument("--num-blocks", type=int, default=64, help="blocks of the KV cache, 16 tokens each")
    parser.add_argument("--budget", type=int, default=64, help="at most so many tokens a step")
    parser.add_argument("--max-num-seqs", type=int, default=8, help="at most so many sequences a step")
    parser.add_argument("--no-prefix-caching", action="store_true", help="compute equal beginnings again")
    arguments, requests = read_arguments(parser)
    engine = make_engine(
        arguments.num_blocks, arguments.budget, arguments.max_num_seqs, not arguments.no_prefix_caching
    )
    print("each line: request[positions of the tokens that are fed, and blocks added to its table]")
    report(run(engine, requests, print), engine.tokenizer)
    print(f"{engine.scheduler.num_preemptions} preemptions")
    blocks = engine.scheduler.blocks
    print(f"prefix cache: {blocks.num_hits} of {blocks.num_queries} prompt tokens found\n\nwhere to read on:")
    for place in PLACES:
        print(f"  {place.idea:36} -> nanovllm/{place.ours}  ({place.differs})")


if __name__ == "__main__":
    main()

# Exercises 3.1 to 3.3 are in README.md. Write the answers into exercises.py, then: python docs/learn/check.py 3
