"""Our engine against Hugging Face `generate`: same weights, same numbers, same threads, taking turns in one process.

Turns matter: on a shared machine speed drifts by more than what is compared, so a ratio counts only within one turn.
The Hugging Face model is filled from our checkpoint reader, so a GGUF serves both sides and nothing is downloaded.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import transformers
from tqdm import tqdm

from nanovllm.bench.report import Columns, print_rows
from nanovllm.bench.throughput import run_workload, warm_up
from nanovllm.bench.workload import Lengths, Workload, WorkloadShape
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.errors import ModelError
from nanovllm.weights.checkpoint import open_checkpoint
from nanovllm.weights.resolve import resolve_model

SHAPES = {
    "1 prompt": WorkloadShape(1, Lengths(32, 32), Lengths(64, 64)),
    "16 prompts": WorkloadShape(16, Lengths(32, 256), Lengths(64, 64)),
}
DROPPED = ("model_type", "dtype", "torch_dtype", "auto_map")  # given in other ways, or code that is never run


def load_hf(name: str, dtype: torch.dtype, device: torch.device) -> Any:
    """The same model as transformers builds it, with the tensors of our checkpoint.

    transformers 5 keeps the experts of a layer in one tensor, under another name than files do: only `from_pretrained`
    renames and merges them."""
    logging: Any = transformers.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    checkpoint = open_checkpoint(resolve_model(name))
    try:
        fields = {key: value for key, value in checkpoint.config.items() if key not in DROPPED}
        config = transformers.AutoConfig.for_model(checkpoint.config["model_type"], **fields)
        family: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        tensors = {key: checkpoint.read(key) for key in checkpoint.names()}
        model, found = family.from_pretrained(
            None, config=config, state_dict=tensors, dtype=dtype, output_loading_info=True
        )
    finally:
        checkpoint.close()
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    missing, extra = sorted(set(found["missing_keys"]) - tied), sorted(found["unexpected_keys"])
    if missing or extra:
        raise ModelError(f"{name}: Hugging Face's model has other tensors: {missing[:4]} missing, {extra[:4]} extra")
    # No end token: generate() then neither stops at it nor forbids it (min_new_tokens would), as with our ignore_eos.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.to(device).eval()


@torch.inference_mode()
def run_hf(model: Any, workload: Workload) -> tuple[float, list[list[int]]]:
    """One left-padded batch; (seconds, new tokens of each). All outputs of a workload here have one length."""
    [length] = set(workload.output_lens)
    started = time.perf_counter()
    width = max(map(len, workload.prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in workload.prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in workload.prompts], device=model.device)
    out = model.generate(
        ids, attention_mask=mask, do_sample=False, min_new_tokens=length, max_new_tokens=length, use_cache=True
    )
    new = out[:, width:].tolist()
    seconds = time.perf_counter() - started
    assert all(len(row) == length for row in new), "Hugging Face stopped early: token counts would differ"
    return seconds, new


def compare(engine: LLMEngine, model: Any, shape: WorkloadShape, seed: int, repeat: int) -> dict[str, Any]:
    vocab_size = engine.model_config.vocab_size
    ours, theirs, agreements, wastes = [], [], [], []
    title = f"{shape.num_seqs} prompts against Hugging Face"
    for turn in tqdm(range(repeat), desc=title, unit="turn", disable=None, leave=False):
        workload = shape.draw(seed + turn, vocab_size)  # fresh prompts: nothing of them is in the prefix cache
        run = run_workload(engine, workload, temperature=0.0)
        seconds, tokens = run_hf(model, workload)
        assert run.num_output_tokens == sum(map(len, tokens)) == workload.num_output_tokens
        ours.append(run.output_rate)
        theirs.append(run.num_output_tokens / seconds)
        wastes.append(run.kv_waste)
        pairs = [(a, b) for mine, other in zip(run.token_ids, tokens) for a, b in zip(mine, other)]
        agreements.append(sum(a == b for a, b in pairs) / len(pairs))
    ratios = [a / b for a, b in zip(ours, theirs)]
    padded = shape.num_seqs * (max(map(len, workload.prompts)) + workload.output_lens[0])
    return {
        "num_seqs": shape.num_seqs,
        "input_len": str(shape.input_len),
        "output_len": str(shape.output_len),
        "ours_tokens_per_second": statistics.median(ours),
        "hf_tokens_per_second": statistics.median(theirs),
        "ratio": statistics.median(ratios),
        "ratio_spread": [min(ratios), max(ratios)],
        "equal_greedy_tokens": statistics.mean(agreements),
        "kv_slots_per_token": statistics.median(wastes),
        "kv_slots_per_token_of_a_padded_batch": padded / (workload.num_prompt_tokens + workload.num_output_tokens),
        "repeat": repeat,
    }


def compare_all(
    engine: LLMEngine, seed: int, repeat: int, shapes: dict[str, WorkloadShape] | None = None
) -> dict[str, Any]:
    dtype, device = getattr(torch, engine.describe()["runs_on"]["dtype"]), engine.executor.probe().device
    model = load_hf(engine.config.model, dtype, device.torch_device)
    warm_up(engine, seed)
    run_hf(model, WorkloadShape(2, Lengths(24, 24), Lengths(4, 4)).draw(seed, engine.model_config.vocab_size))
    return {name: compare(engine, model, shape, seed, repeat) for name, shape in (shapes or SHAPES).items()}


def print_comparison(found: dict[str, Any]) -> None:
    columns: Columns = [
        ("workload", "name"),
        ("ours tok/s", "ours_tokens_per_second"),
        ("hf tok/s", "hf_tokens_per_second"),
        ("ratio", "ratio", "{:.2f}x"),
        ("spread", "ratio_spread", "{0[0]:.2f}..{0[1]:.2f}"),
        ("equal tokens", "equal_greedy_tokens", "{:.1%}"),
        ("KV slots/token", "kv_slots_per_token", "{:.3f}"),
        ("padded", "kv_slots_per_token_of_a_padded_batch", "{:.3f}"),
    ]
    print_rows("against Hugging Face generate", [{"name": name, **row} for name, row in found.items()], columns)
