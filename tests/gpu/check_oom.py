"""On a real GPU: when a step runs out of memory, the request that brought it the most tokens fails; all others go on.

    python tests/gpu/check_oom.py [--out DIR] [--device cuda] [--model qwen3-0.6b]

Twice. *Raised*: the forward pass raises torch.OutOfMemoryError whenever one request is in the step (runs on a CPU too,
with a tiny model). *Real*: after start-up the rest of the card is taken away, and a long prompt needs more than is
left; then memory is given back. Each time: that one request failed, with the cause; that the others, those in its step
too, have the tokens of an engine where nothing went wrong; that no block is lost; and that afterwards all are served,
the failed one too. In float32: batches differ from run to run, and in 16 bits a near-tie could fall the other way.
Writes check_oom.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from nanovllm import LLM, SamplingParams  # noqa: E402
from nanovllm.engine.llm_engine import LLMEngine  # noqa: E402
from nanovllm.outputs import RequestOutput  # noqa: E402
from tests.gaps import make_reference  # noqa: E402

VICTIM = "victim"
LEFT_BYTES = 96 << 20  # of the card, in the real case: graphs and short prompts need nothing new, the victim needs more
NUM_OTHERS = 8
Requests = dict[str, tuple[list[int], SamplingParams]]


def requests(victim_len: int) -> Requests:
    """The victim's logprobs keep its steps out of captured graphs: they allocate."""
    plain = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    scored = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=1)
    some: Requests = {str(i): ([3 + i] + [7 + 5 * i + j for j in range(10 + i)], plain) for i in range(NUM_OTHERS)}
    some[VICTIM] = ([11 + (13 * j) % 200 for j in range(victim_len)], scored)
    return some


def serve(engine: LLMEngine, wanted: Requests) -> dict[str, RequestOutput]:
    """Two others begin; the victim comes while they run, and the rest behind it."""
    order = [*list(wanted)[:2], VICTIM, *(name for name in list(wanted)[2:] if name != VICTIM)]
    final: dict[str, RequestOutput] = {}

    def step() -> None:
        final.update((delta.request_id, delta.output()) for delta in engine.step())

    for i, name in enumerate(order):
        if name not in wanted:
            continue
        engine.add_request(name, *wanted[name], final_only=True)
        if i == 1:
            step()
    began = time.monotonic()
    while engine.has_unfinished_requests():
        step()
        assert time.monotonic() - began < 300, "hangs"
    return final


@contextmanager
def raised(engine: LLMEngine) -> Iterator[None]:
    """The forward pass of every step that holds the victim raises."""
    launch, model = engine.executor.launch, engine.executor.runner.model  # type: ignore[attr-defined]
    forward, holds_victim = model.forward, False

    def noted(plan: Any) -> Any:
        nonlocal holds_victim
        seqs = [engine._by_seq[entry.seq_id][0].request_id for entry in plan.entries if entry.seq_id in engine._by_seq]
        holds_victim = VICTIM in seqs
        return launch(plan)

    def failing(*args: Any, **kwargs: Any) -> Any:
        if holds_victim:
            raise torch.OutOfMemoryError("out of memory, raised by the test")
        return forward(*args, **kwargs)

    engine.executor.launch, model.forward = noted, failing  # type: ignore[method-assign]
    try:
        yield
    finally:
        engine.executor.launch, model.forward = launch, forward  # type: ignore[method-assign]


@contextmanager
def really(engine: LLMEngine) -> Iterator[None]:
    """All but LEFT_BYTES of the card is taken."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    hold = []
    while (size := min(torch.cuda.mem_get_info()[0] - LEFT_BYTES, 1 << 30)) > 4 << 20:  # no single piece need be there
        hold.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    try:
        yield
    finally:
        del hold
        torch.cuda.empty_cache()


def check(engine: LLMEngine, wanted: Requests, shortage: Callable[[LLMEngine], Any]) -> dict[str, Any]:
    clean = {name: output.outputs[0].token_ids for name, output in serve(engine, wanted).items()}
    assert len(clean) == len(wanted)
    with shortage(engine):
        final = serve(engine, wanted)
    assert set(final) == set(wanted), "every request ends"
    failed = {name for name, output in final.items() if output.outputs[0].finish_reason == "error"}
    assert VICTIM in failed, "there was memory enough: give the victim a longer prompt"
    assert failed == {VICTIM}, {name: final[name].error for name in failed}
    assert "memory" in str(final[VICTIM].error), final[VICTIM].error
    for name in set(wanted) - failed:
        assert final[name].outputs[0].token_ids == clean[name], f"request {name} was harmed"
    assert engine.scheduler.blocks.num_used == 0, "blocks were lost"
    again = {name: output.outputs[0].token_ids for name, output in serve(engine, wanted).items()}
    assert again == clean, "after it, all are served"
    return {"requests": len(wanted), "failed": len(failed), "said": str(final[VICTIM].error)[:200]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for the JSON file")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--model", default="qwen3-0.6b", help="a folder of benchmarks/models; weights are made up")
    parser.add_argument("--backends", default="auto,sdpa")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temp:
        model: dict[str, Any] = {
            "model": str(ROOT / "benchmarks/models" / args.model),
            "load_format": "dummy",
            "max_model_len": 8192,
        }
        if not on_gpu:
            model = {"model": str(make_reference("llama", Path(temp), lens=(1,)).path), "max_model_len": 160}
        for backend in args.backends.split(","):
            for label, shortage in {"raised": raised, **({"real": really} if on_gpu else {})}.items():
                with LLM(
                    **model,
                    dtype="float32",
                    skip_tokenizer_init=True,
                    device=args.device,
                    attn_backend=backend,
                    max_num_seqs=4,
                    gpu_memory_utilization=0.5,
                    num_kvcache_blocks=256,
                    enable_prefix_caching=False,
                ) as llm:
                    found = check(llm.engine, requests(8000 if label == "real" else 100), shortage)
                    found |= {"case": label, "attn_backend": llm.engine.describe()["runs_on"]["attn_backend"]}
                results.append(found)
                print(json.dumps(found), flush=True)
    facts = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name() if on_gpu else None}
    (args.out / "check_oom.json").write_text(json.dumps({**facts, "results": results}, indent=1))


if __name__ == "__main__":
    main()
