"""Guessed tokens on a real GPU. Not collected by pytest (no GPU in CI).

    python tests/gpu/check_speculation.py [--model smollm2] [--device cuda] [--out DIR]

The same requests with and without guesses, in float32, where products of another number of rows round alike: greedy,
with seeds, filters, logprobs, penalties and a grammar, alone and together, captured and eager, with few blocks
(preemption), with a draft model, and with the own layer of a small DeepSeek-V3 that is made here. Tokens must be equal.
Then the share of right guesses. For speed: `nanovllm bench speculation`.
Prints a table last, writes JSON; exit status 1 if a check failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from nanovllm import LLM, SamplingParams  # noqa: E402
from tests.mtp_models import add_knowing_layer, add_mtp_layer  # noqa: E402
from tests.tiny_models import DEEPSEEK_VARIANTS, Variant, hf_model  # noqa: E402

TEXT = "one two three four five six seven eight nine ten. " * 6
LOOKUP = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.8, "seed": 1},
    "filters": {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "seed": 2},
    "logprobs": {"temperature": 0.7, "seed": 3, "logprobs": 5},
    "penalties": {"temperature": 0.7, "seed": 4, "repetition_penalty": 1.05},
    "several": {"temperature": 0.9, "seed": 5, "n": 3},
    "stop": {"temperature": 0, "stop": ["seven"]},
}
EDITS: dict[str, dict[str, Any]] = {  # need the guesses before a row
    "counts": {"temperature": 0, "frequency_penalty": 1.0, "presence_penalty": 0.5},
    "bad words": {"temperature": 0.7, "seed": 6, "bad_words": ["seven", "four five"]},
}
FORM: dict[str, Any] = {"temperature": 0, "structured_outputs": {"regex": "(one|two|three| )+"}, "max_tokens": 20}
GRAMMARS: dict[str, dict[str, Any]] = {
    "grammar": FORM,
    "several in a form": {**FORM, "temperature": 1.0, "seed": 7, "n": 3},
    "form and counts": {**FORM, "frequency_penalty": 1.0, "max_tokens": 40},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "captured": {},
    "one step a visit": {"decode_steps": 1},
    "few blocks": {"num_kvcache_blocks": 24, "kvcache_block_size": 16, "max_model_len": 384},
    "eager": {"enforce_eager": True},
    "draft model": {},  # the model itself: its guesses must be right
    "mtp": {"skip_tokenizer_init": True, "max_model_len": 160},
    "mtp that knows": {"skip_tokenizer_init": True, "max_model_len": 160},  # its guesses must be right, too
}
# Sizes that tensor cores take
SHAPE = {
    "hidden_size": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
}
SHAPE |= {"qk_nope_head_dim": 32, "v_head_dim": 32}


def make_deepseek(folder: Path, knows: bool) -> Path:
    tiny = DEEPSEEK_VARIANTS["deepseek-v3"]
    hf_model(Variant(tiny.family, {**tiny.config, **SHAPE}), seed=0).save_pretrained(folder / "plain")
    (add_knowing_layer if knows else add_mtp_layer)(folder / "plain", folder / "mtp")
    return folder / "mtp"


def with_grammars() -> dict[str, dict[str, Any]]:
    return {**REQUESTS, **EDITS, **{name: {**fields, "ignore_eos": False} for name, fields in GRAMMARS.items()}}


def answers(llm: LLM, requests: dict[str, dict[str, Any]]) -> dict[str, Any]:
    params = [SamplingParams(**{"max_tokens": 64, "ignore_eos": True, **fields}) for fields in requests.values()]
    prompt: Any = TEXT if llm.engine.tokenizer is not None else {"prompt_token_ids": [7, 8, 9, 10, 11] * 6}
    outs = llm.generate([prompt] * len(params), params, use_tqdm=False)
    return {name: [(c.token_ids, c.finish_reason) for c in out.outputs] for name, out in zip(requests, outs)}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default=",".join(OPTIONS), help="settings, with commas")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in args.only.split(","):
        rows.append(check(name, args.model, args.device))
        print("ok    " if rows[-1]["right"] else "FAILED", json.dumps(rows[-1]), flush=True)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "check_speculation.json").write_text(json.dumps(rows, indent=1))
    return int(not all(row["right"] for row in rows))


def check(name: str, model: str, device: str) -> dict[str, Any]:
    common = {"device": device, "dtype": "float32", "quantization": "none", "max_num_seqs": 16}
    common |= {"max_model_len": 1024, **OPTIONS[name]}
    requests = {**REQUESTS, **EDITS} if name.startswith("mtp") or name == "few blocks" else with_grammars()
    guessing: dict[str, Any] = LOOKUP
    with tempfile.TemporaryDirectory() as folder:
        if name == "draft model":
            guessing = {"model": model, "num_speculative_tokens": 3}
        elif name.startswith("mtp"):
            model, guessing = str(make_deepseek(Path(folder), "knows" in name)), {"method": "mtp"}
            guessing["num_speculative_tokens"] = 2
            requests = {key: fields for key, fields in requests.items() if key not in ("stop", "bad words")}
        found: list[dict[str, Any]] = []
        for more in ({}, {"speculative_config": guessing}):
            with LLM(model, **common, **more) as llm:
                together = answers(llm, requests)
                alone = {key: answers(llm, {key: fields})[key] for key, fields in requests.items()}
                found.append({"together": together, "alone": alone})
                stats = llm.engine.stats
    wrong = [f"{kind} {key}" for kind in found[0] for key in requests if found[0][kind][key] != found[1][kind][key]]
    fewest = 0.95 * stats.num_drafted if name in ("draft model", "mtp that knows") else name != "mtp"
    is_right = not wrong and stats.num_drafted > 0 and stats.num_accepted >= fewest
    counts = {"drafted": stats.num_drafted, "accepted": stats.num_accepted}
    return {"name": name, "right": is_right, "wrong": wrong, **counts}


if __name__ == "__main__":
    sys.exit(main())
