"""Tiny random models of every family, saved by transformers, and what transformers answers for them.

Weights are drawn far wider than a fresh model's, biases and norms included: a fresh model has zero biases, norms of one
and almost equal logits, so it would hide a forgotten bias and its greedy tokens would be decided by rounding.
`answers` refuses a model with a near-tie and `build` then tries the next seed.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

VOCAB = 300
MAX_POSITION = 160
EOS = 2
NEW_TOKENS = 12
# On both sides of one, two and four blocks of 16 and of one and two blocks of 32, and the shortest prompts there are.
PROMPT_LENS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65)
MIN_GAP = 2e-3  # between the two best logits, wherever a greedy token is chosen
SCALE = 0.3


@dataclass(frozen=True)
class Variant:
    family: str  # prefix of the classes in transformers
    config: dict[str, Any] = field(default_factory=dict)
    save: dict[str, Any] = field(default_factory=dict)  # arguments of save_pretrained


def _rope(kind: str, **params: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **params}}


VARIANTS = {
    "llama": Variant("Llama", {"num_attention_heads": 4, "num_key_value_heads": 4}),
    "llama-gqa-tied": Variant(
        # SmolLM2's odd shape: 9 query heads over 3 KV heads
        "Llama",
        {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8, "hidden_size": 72,
         "tie_word_embeddings": True},
    ),
    "llama-mqa-bias": Variant("Llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "llama-sharded": Variant("Llama", {"num_hidden_layers": 3}, {"max_shard_size": "60KB"}),
    "llama-theta": Variant("Llama", _rope("default", rope_theta=500.0)),
    "llama-linear": Variant("Llama", _rope("linear", factor=4.0)),
    "llama-dynamic": Variant("Llama", _rope("dynamic", factor=2.0)),
    "llama-llama3": Variant(
        "Llama",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "llama-yarn": Variant("Llama", _rope("yarn", factor=2.5, original_max_position_embeddings=64)),
    "llama-yarn-mscale": Variant(
        "Llama",
        _rope("yarn", factor=2.5, original_max_position_embeddings=64, beta_fast=16.0, beta_slow=2.0, mscale=0.7,
              mscale_all_dim=1.3, truncate=False),
    ),
    "mistral-window": Variant("Mistral", {"sliding_window": 20}),
    "mistral": Variant("Mistral", {"sliding_window": None, "head_dim": 24}),
    "qwen2": Variant("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": Variant(
        "Qwen2",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 17, "max_window_layers": 1},
    ),
    "qwen3": Variant("Qwen3", {"head_dim": 20}),
    "qwen3-bias-tied": Variant("Qwen3", {"head_dim": 6, "attention_bias": True, "tie_word_embeddings": True}),
}  # fmt: skip

QWEN3_MOE = {"head_dim": 20, "moe_intermediate_size": 40, "num_experts": 6, "num_experts_per_tok": 2}
MOE_VARIANTS = {
    "mixtral": Variant("Mixtral", {"num_local_experts": 8}),
    "mixtral-top1": Variant("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1, "num_key_value_heads": 1}),
    "mixtral-window-sharded": Variant(
        "Mixtral",
        {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 20, "tie_word_embeddings": True},
        {"max_shard_size": "60KB"},
    ),
    "qwen3-moe": Variant("Qwen3Moe", {**QWEN3_MOE, "norm_topk_prob": False}),
    "qwen3-moe-renormalised": Variant("Qwen3Moe", {**QWEN3_MOE, "norm_topk_prob": True, "num_key_value_heads": 4}),
    "qwen3-moe-dense-layers": Variant(
        "Qwen3Moe",
        {**QWEN3_MOE, "num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": True, "attention_bias": True},
    ),
    "qwen3-moe-every-second": Variant(  # and every expert taken, and a window
        "Qwen3Moe",
        {
            **QWEN3_MOE,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "num_experts": 3,
            "num_experts_per_tok": 3,
            "use_sliding_window": True,
            "sliding_window": 20,
            "norm_topk_prob": False,
        },
    ),
}

DEEPSEEK = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
}
GROUPS = {"n_group": 4, "topk_group": 2, "q_lora_rank": 20}
MLA_YARN = {"factor": 2.5, "original_max_position_embeddings": 64}
DEEPSEEK_VARIANTS = {
    "deepseek-v2-lite": Variant(
        "DeepseekV2",
        {**DEEPSEEK, **_rope("yarn", **MLA_YARN, mscale=0.707, mscale_all_dim=0.707), "q_lora_rank": None},
    ),
    "deepseek-v2-groups": Variant(
        "DeepseekV2",
        {**DEEPSEEK, **GROUPS, "topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0},
    ),
    "deepseek-v3": Variant(
        "DeepseekV3",
        {**DEEPSEEK, **GROUPS, **_rope("yarn", **MLA_YARN, mscale=1.0, mscale_all_dim=1.0), "n_shared_experts": 2},
    ),
    "deepseek-v3-halves": Variant(  # and all groups, no renormalising
        "DeepseekV3",
        {
            **DEEPSEEK,
            **GROUPS,
            **_rope("yarn", **MLA_YARN, mscale=1.0, mscale_all_dim=1.3),
            "topk_group": 4,
            "norm_topk_prob": False,
            "rope_interleave": False,
        },
    ),
}


@dataclass(frozen=True)
class Answer:
    """transformers' greedy continuation of one prompt, and its logprobs at every position of the whole."""

    prompt: list[int]
    tokens: list[int]
    logprobs: torch.Tensor  # [len(prompt) + len(tokens), vocab]; row i predicts token i + 1


@dataclass(frozen=True)
class TinyModel:
    name: str
    path: Path
    answers: tuple[Answer, ...]

    @property
    def prompts(self) -> list[list[int]]:
        return [answer.prompt for answer in self.answers]

    @property
    def tokens(self) -> list[list[int]]:
        return [answer.tokens for answer in self.answers]

    def load_hf(self) -> Any:
        return load_hf(self.path)


def load_hf(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    options = {"attn_implementation": "eager", "dtype": torch.float32}
    return eager(AutoModelForCausalLM.from_pretrained(path, **options)).eval()


def eager(model: Any) -> Any:
    """Experts one after another, plain matmuls: nothing in common with what we test."""
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")
    return model


def random_prompts(lens: tuple[int, ...] = PROMPT_LENS, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lens]


def hf_config(variant: Variant) -> Any:
    import transformers

    options = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITION,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        **variant.config,
    }
    return getattr(transformers, f"{variant.family}Config")(**options)


def hf_model(variant: Variant, seed: int) -> Any:
    import transformers

    config = hf_config(variant)
    config._attn_implementation = "eager"  # plain matmul and softmax: nothing in common with what we test
    model = eager(getattr(transformers, f"{variant.family}ForCausalLM")(config)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, SCALE, generator=generator)
            if "norm" in name:
                parameter.add_(1.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, SCALE, generator=generator)
    return model


@torch.no_grad()
def hf_logprobs(model: Any, token_ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([token_ids]), use_cache=False).logits[0].float().log_softmax(-1)


@torch.no_grad()
def answer(model: Any, prompt: list[int], num_tokens: int = NEW_TOKENS) -> Answer | None:
    """None if two tokens are so close at any step that rounding may choose (or if eos came)."""
    ids = torch.tensor([prompt])
    tokens = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )[0, len(prompt) :].tolist()
    if len(tokens) < num_tokens:
        return None
    logprobs = hf_logprobs(model, prompt + tokens)
    best = logprobs[len(prompt) - 1 : -1].topk(2).values
    return None if bool((best[:, 0] - best[:, 1]).min() < MIN_GAP) else Answer(prompt, tokens, logprobs)


def build(name: str, folder: Path) -> TinyModel:
    variant = {**VARIANTS, **MOE_VARIANTS, **DEEPSEEK_VARIANTS}[name]
    for seed in range(50):
        model = hf_model(variant, seed)
        answers: list[Answer] = []
        for prompt in random_prompts():
            found = answer(model, prompt)
            if found is None:
                break
            answers.append(found)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model.save_pretrained(folder, **variant.save)
            return TinyModel(name, folder, tuple(answers))
    raise AssertionError(f"{name}: no seed without near-ties")


def edit_config(folder: Path, **changes: Any) -> None:
    """Rewrite config.json; a value of ... removes the key."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'forbidden' %}{{ raise_exception('no such role') }}{% endif %}"
    "{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SPECIAL_TOKENS = ["<|pad|>", "<|bos|>", "<|eos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]


def save_tokenizer(folder: Path) -> None:
    """A byte-level BPE of exactly VOCAB tokens; bos is put before every prompt, as Llama's does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = "the capital of the land is the town on the river, and the men of the town sing in the rain all day long"
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text] * 4, trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", SPECIAL_TOKENS.index("<|bos|>"))]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
