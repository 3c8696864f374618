"""On a real GPU: the sampler through the engine.

    python tests/gpu/check_sampling.py [--model benchmarks/models/qwen3-0.6b] [--out FILE]

Requests of every kind run together and alone, captured and eager, one and eight tokens a visit: seeded rows must give
the same tokens each time (fp32: in 16 bits other shapes of products round other logits). Bans, biases, minimum lengths
and allowed tokens must hold, logprobs must be consistent with each other and with the token.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from nanovllm import LLM, SamplingParams  # noqa: E402

OPTIONS = {
    "device": "cuda",
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "max_model_len": 1024,
    "dtype": "float32",
    "num_kvcache_blocks": 600,
}
KINDS: list[dict[str, Any]] = [
    {}, {"temperature": 0}, {"top_k": 20, "top_p": 0.95}, {"top_p": 0.9}, {"min_p": 0.2}, {"top_k": 1},
    {"top_k": 1000, "top_p": 0.99}, {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"temperature": 0, "repetition_penalty": 1.5}, {"logit_bias": {7: 30.0, 9: -100.0}, "top_p": 0.8},
    {"allowed_token_ids": [11, 12, 13]}, {"allowed_token_ids": [11, 12, 13], "temperature": 0},
    {"logprobs": 5, "top_k": 20}, {"logprobs": 0}, {"logprobs": 20, "temperature": 0}, {"logprobs": 30},
    {"logprobs": 3, "prompt_logprobs": 2, "top_p": 0.5}, {"min_tokens": 10, "stop_token_ids": [11, 12]},
]  # fmt: skip


def params() -> list[SamplingParams]:
    return [
        SamplingParams(**{"temperature": 0.8, "seed": 100 + i, "max_tokens": 24, "ignore_eos": True, **kind})
        for i, kind in enumerate(KINDS)
    ]


def prompts() -> list[dict[str, Any]]:
    return [{"prompt_token_ids": [(i * 37 + j * 11) % 5000 + 20 for j in range(20 + 7 * i)]} for i in range(len(KINDS))]


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def check_logprobs(outputs: list[Any]) -> int:
    checked = 0
    for output, given in zip(outputs, params()):
        if given.logprobs is None:
            assert output.outputs[0].logprobs is None
            continue
        assert len(output.outputs[0].logprobs) == len(output.outputs[0].token_ids)
        for position, token in zip(output.outputs[0].logprobs, output.outputs[0].token_ids):
            own = position[token]
            tops = sorted((one for one in position.values() if one.rank <= given.logprobs), key=lambda one: one.rank)
            assert [one.rank for one in tops] == list(range(1, len(tops) + 1)) or own.rank > given.logprobs, position
            values = [one.logprob for one in tops]
            assert values == sorted(values, reverse=True)
            assert own.logprob <= 0 and math.isfinite(own.logprob)  # noqa: PT018
            assert len(position) in (max(given.logprobs, 1), given.logprobs + 1), (len(position), given.logprobs)
            if given.temperature == 0:
                assert own.rank == 1
            checked += 1
    scored = outputs[16].prompt_logprobs
    assert len(scored) == len(outputs[16].prompt_token_ids)
    assert scored[0] is None
    assert all(len(one) in (2, 3) for one in scored[1:])
    return checked


def check_promises(found: list[list[int]]) -> None:
    assert all(token in (11, 12, 13) for row in (found[10], found[11]) for token in row)
    assert 9 not in found[9]
    assert found[9].count(7) > 12, found[9]
    assert not set(found[17][:9]) & {11, 12}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=str(ROOT / "benchmarks/models/qwen3-0.6b"))
    parser.add_argument("--out")
    args = parser.parse_args()
    report: dict[str, Any] = {}
    with LLM(args.model, **OPTIONS, max_num_seqs=32) as llm:
        outputs = llm.generate(prompts(), params(), use_tqdm=False)
        whole = tokens(outputs)
        report["logprob positions checked"] = check_logprobs(outputs)
        check_promises(whole)
        report["again"] = tokens(llm.generate(prompts(), params(), use_tqdm=False)) == whole
        alone = [tokens(llm.generate([p], [s], use_tqdm=False))[0] for p, s in zip(prompts(), params())]
        report["alone"] = [i for i, (a, b) in enumerate(zip(alone, whole)) if a != b]
        turned = tokens(llm.generate(prompts()[::-1], params()[::-1], use_tqdm=False))[::-1]
        report["other order"] = [i for i, (a, b) in enumerate(zip(turned, whole)) if a != b]
    few = {"num_kvcache_blocks": 12, "kvcache_block_size": 16, "max_num_batched_tokens": 64}
    others = {"one token a visit": {"decode_steps": 1}, "eager": {"enforce_eager": True}, "preempted": few}
    for name, options in others.items():
        with LLM(args.model, **{**OPTIONS, "max_num_seqs": 32, **options}) as llm:
            found = tokens(llm.generate(prompts(), params(), use_tqdm=False))
            report[name] = [i for i, (a, b) in enumerate(zip(found, whole)) if a != b]
            if name == "preempted":
                report["preemptions"] = llm.engine.scheduler.num_preemptions
    print(json.dumps(report, indent=1))
    if args.out:
        Path(args.out).write_text(json.dumps(report))
    differ = [name for name in ("alone", "other order", *others) if report[name]]
    return int(bool(differ) or not report["again"])


if __name__ == "__main__":
    sys.exit(main())
