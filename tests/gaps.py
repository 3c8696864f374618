"""Where may greedy output differ from the fp32 reference? Only where its two best logits are within rounding.

Rounding, measured. A bf16 number has 8 significant bits, so an activation of size m is off by up to m * 2^-9 each time
it is stored, and each layer hands that on to the next: what arrives at the logits cannot be said in advance, but it can
be measured. All models have weights that bf16 can hold, so the whole difference between a run in bf16 and one in fp32
is rounding. Fed the same tokens, let e be the largest difference of any logprob. If the reference prefers a to b by a
gap and the run in bf16 prefers b, then a lost and b won together at least the gap, and each moved by e at most: the gap
is at most 2e. (Logprobs serve as well as logits: the sum they are divided by cancels in a gap.)

A wrong kernel must not be excused by its own large e: it is held to LIMIT times what transformers' bf16 run of the same
model is off by, which has no line in common with us.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from nanovllm import LLM, RequestOutput, SamplingParams
from tests.tiny_models import MAX_POSITION, Variant, hf_logprobs, hf_model, random_prompts

# Heads of 32: what every backend accepts. Three query heads to a KV head.
SHAPE = {
    "hidden_size": 192,
    "intermediate_size": 256,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "eos_token_id": None,
}
FAMILIES = {
    "llama": Variant("Llama", {**SHAPE, "head_dim": 32}),
    "qwen2": Variant("Qwen2", SHAPE),
    "qwen3": Variant("Qwen3", {**SHAPE, "head_dim": 32}),
}
# The tiny models of the other tests amplify rounding until it decides half of all tokens. Weights of this share of
# theirs leave errors of some 0.05 and gaps of some 0.2: few tokens may differ, and most must not.
SHRINK = 0.25
LIMIT = 2.0  # the order of additions differs, so the largest of many thousand errors does too
COMPARED = 50  # tokens at every position whose logprobs are compared: those that could win, and more
NEW_TOKENS = 24
PROMPT_LENS = (1, 2, 15, 16, 17, 33, 63, 64, 65, 40, 7, 100)


@dataclass(frozen=True)
class Reference:
    path: Path
    prompts: list[list[int]]
    tokens: list[list[int]]  # greedy, fp32
    logprobs: list[torch.Tensor]  # [prompt and tokens, vocab] each; row i predicts token i + 1
    error: float  # the largest of transformers' own bf16 run

    def gap(self, i: int, position: int) -> float:
        """Between the two best, where token `position` of answer i is chosen."""
        best = self.logprobs[i][len(self.prompts[i]) - 1 + position].topk(2).values
        return float(best[0] - best[1])


@dataclass(frozen=True)
class Row:
    """What one engine did, as a line of the table."""

    family: str
    backend: str
    batch: int
    label: str
    sequences: int
    differing: int
    largest_gap: float  # of the reference, where an answer first leaves it
    error: float  # the largest, of tokens that were fed and of tokens that were generated
    bound: float  # on the gap

    def faults(self, reference: Reference) -> list[str]:
        found = []
        if self.error > LIMIT * reference.error:
            found.append(f"error {self.error:.4f} is no rounding: transformers in bf16 is off by {reference.error:.4f}")
        if self.largest_gap > self.bound:
            found.append(f"a token changed across a gap of {self.largest_gap:.4f}, rounding explains {self.bound:.4f}")
        return found


@torch.no_grad()
def make_reference(family: str, folder: Path, lens: tuple[int, ...] = PROMPT_LENS) -> Reference:
    model = hf_model(FAMILIES[family], seed=0)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.mul_(SHRINK)
        parameter.copy_(parameter.bfloat16())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    prompts, tokens, logprobs = random_prompts(lens), [], []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
        )[0, len(prompt) :].tolist()
        assert len(made) == NEW_TOKENS
        tokens.append(made)
        logprobs.append(hf_logprobs(model, prompt + made))
    half = model.bfloat16()
    error = max(
        float((hf_logprobs(half, prompt + made) - full).abs().max())
        for prompt, made, full in zip(prompts, tokens, logprobs)
    )
    return Reference(folder, prompts, tokens, logprobs, error)


def first_difference(got: list[int], wanted: list[int]) -> int | None:
    return next((i for i, (a, b) in enumerate(zip(got, wanted)) if a != b), None)


def largest_error(positions: list[Any], reference: torch.Tensor) -> float:
    """positions: as in `prompt_logprobs` or `logprobs`; reference: a row for each."""
    pairs = [
        (entry.logprob, row[token_id].item())
        for position, row in zip(positions, reference)
        if position is not None
        for token_id, entry in position.items()
    ]
    return max((abs(got - wanted) for got, wanted in pairs), default=0.0)


def teacher_forced_error(llm: LLM, reference: Reference) -> float:
    """Feeds the reference's own answers."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=COMPARED, ignore_eos=True)
    texts = [prompt + tokens for prompt, tokens in zip(reference.prompts, reference.tokens)]
    outputs = llm.generate(texts, params, use_tqdm=False)
    return max(
        largest_error((output.prompt_logprobs or [])[1:], rows) for output, rows in zip(outputs, reference.logprobs)
    )


def generated_error(outputs: list[RequestOutput], reference: Reference) -> float:
    """Of generated tokens' logprobs, up to where an answer leaves the reference: so far both saw the same tokens."""
    errors = [0.0]
    for i, output in enumerate(outputs):
        completion = output.outputs[0]
        end = first_difference(completion.token_ids, reference.tokens[i])
        shared = len(completion.token_ids) if end is None else end + 1
        rows = reference.logprobs[i][len(reference.prompts[i]) - 1 :]
        errors.append(largest_error((completion.logprobs or [])[:shared], rows))
    return max(errors)


def measure(
    family: str, reference: Reference, batch: int, label: str = "", logprobs: int | None = 2, **options: Any
) -> Row:
    """One engine, greedy. `logprobs=None` takes the path without the host's help (on a GPU: captured graphs); what is
    generated there has no logprobs, so only its tokens are judged."""
    defaults = {
        "skip_tokenizer_init": True,
        "max_model_len": MAX_POSITION,
        "max_num_seqs": batch,
        "max_num_batched_tokens": 512,
        "num_kvcache_blocks": 256,
        "dtype": "bfloat16",
    }
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=logprobs)
    with LLM(str(reference.path), **{**defaults, **options}) as llm:
        backend = llm.engine.describe()["runs_on"]["attn_backend"]
        outputs = llm.generate(reference.prompts, params, use_tqdm=False)
        error = max(teacher_forced_error(llm, reference), generated_error(outputs, reference))
    tokens = [output.outputs[0].token_ids for output in outputs]
    assert [len(some) for some in tokens] == [NEW_TOKENS] * len(tokens), [o.outputs[0].finish_reason for o in outputs]
    ends = [first_difference(got, wanted) for got, wanted in zip(tokens, reference.tokens)]
    gaps = [reference.gap(i, end) for i, end in enumerate(ends) if end is not None]
    return Row(family, backend, batch, label, len(tokens), len(gaps), max(gaps, default=0.0), error, 2 * error)


def table(rows: list[Row]) -> str:
    lines = [" ".join(f"{name:>11}" for name in Row.__dataclass_fields__)]
    for row in rows:
        cells = (f"{cell:.4f}" if isinstance(cell, float) else str(cell) for cell in asdict(row).values())
        lines.append(" ".join(f"{cell:>11}" for cell in cells))
    return "\n".join(lines)
