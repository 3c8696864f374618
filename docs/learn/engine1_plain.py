"""Engine 1: the mathematics of the model, and the shortest loop around it.

    python docs/learn/engine1_plain.py                  (about half a minute on two cores)
    python docs/learn/engine1_plain.py --max-tokens 4   (a few seconds)

A language model is a function from a list of tokens to one score (logit) for every token of the vocabulary: how well it
would continue the list. To generate text, take the best token, append it, and call the function again. That is all this
file does. Nothing is kept from one call to the next, so every new token recomputes every token before it.

The model is SmolLM2-135M-Instruct: a Llama with 30 layers, a vector of 576 numbers for each token, 9 query heads and 3
key and value heads of 64 numbers each. Shapes are in comments: [n, 576] is n tokens with 576 numbers each.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from nanovllm.weights.checkpoint import open_checkpoint
from nanovllm.weights.resolve import resolve_model

# ---- what is asked, the same in all three engines --------------------------------------------------------------------

TEXT = (
    "The library opens at nine in the morning and closes at six in the evening. On Sundays it is closed. Books may be "
    "kept for four weeks, and a fine of one coin is paid for each week after that."
)


@dataclass(frozen=True)
class Request:
    question: str
    max_tokens: int
    arrives: int = 0  # the step before which it arrives. This engine serves one request after another and ignores it.


REQUESTS = [
    Request("What is the capital of France?", 16),
    Request(f"Here is a text. {TEXT} When does the library open?", 32),
    Request("List the months of the year.", 32, arrives=2),
    Request("Repeat after me: one two three four five six seven eight nine ten.", 16, arrives=4),
    Request("Write the numbers from 1 to 20, separated by commas.", 32, arrives=4),
    Request("What is 2 + 2?", 16, arrives=8),
    Request("What is the capital of France?", 16, arrives=12),  # once more: engine 3 finds most of it in its cache
]


@dataclass
class Run:
    """What an engine did with a list of requests."""

    outputs: list[list[int]]  # new tokens of each request, the end token included
    num_passes: int  # times that the weights were read: calls of `forward`
    num_rows: int  # tokens that were sent through the layers, summed over the passes
    seconds: float

    @property
    def num_new(self) -> int:
        return sum(map(len, self.outputs))


# ---- the model -------------------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """One of the 30 decoder layers. A matrix is stored as [outputs, inputs], so it is applied as x @ matrix.T."""

    attention_norm: torch.Tensor  # [576]
    q: torch.Tensor  # [9 * 64, 576]
    k: torch.Tensor  # [3 * 64, 576]
    v: torch.Tensor  # [3 * 64, 576]
    out: torch.Tensor  # [576, 9 * 64]
    mlp_norm: torch.Tensor  # [576]
    gate: torch.Tensor  # [1536, 576]
    up: torch.Tensor  # [1536, 576]
    down: torch.Tensor  # [576, 1536]


NAMES = [
    "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
]  # fmt: skip


@dataclass
class Model:
    embedding: torch.Tensor  # [49152, 576]; also the head: this model ties the two
    layers: list[Layer]
    norm: torch.Tensor
    head_dim: int
    theta: float  # base of the rotary frequencies
    eps: float
    end_token: int
    tokenizer: Any

    def encode(self, question: str) -> list[int]:
        """The question inside the model's chat template, as tokens."""
        chat = [{"role": "user", "content": question}]
        text = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return self.tokenizer.encode(text, add_special_tokens=False)


def load(name: str | None = None) -> Model:
    """The default model from its GGUF file, its weights expanded to 32 bits. Any Llama with a tied head works."""
    checkpoint = open_checkpoint(resolve_model(name))
    config = checkpoint.config

    def read(name: str) -> torch.Tensor:
        return checkpoint.read(f"model.{name}.weight").float()

    return Model(
        embedding=read("embed_tokens"),
        layers=[Layer(*(read(f"layers.{i}.{n}") for n in NAMES)) for i in range(config["num_hidden_layers"])],
        norm=read("norm"),
        head_dim=config["head_dim"],
        theta=config["rope_theta"],
        eps=config["rms_norm_eps"],
        end_token=config["eos_token_id"],
        tokenizer=checkpoint.load_tokenizer(),
    )


# ---- its mathematics -------------------------------------------------------------------------------------------------


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale every vector to a mean square of 1, then each of its numbers by a learnt weight."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """RoPE: numbers i and i + d/2 of a head are a point in a plane, turned by the angle position * theta^(-2i/d).

    The dot product of a query turned by m and a key turned by n depends on m - n alone. So a key can be turned once,
    when it is made, and stays right however long the text becomes: engine 2 will keep it."""
    half = x.shape[-1] // 2
    speeds = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = (positions[:, None] * speeds)[:, None, :]  # [n, 1, d/2]: the same for all heads
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


def project(model: Model, layer: Layer, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """q [n, 9, 64], k and v [n, 3, 64] of n tokens. Each depends on its own token's vector and position only."""
    q, k, v = ((x @ matrix.T).view(len(x), -1, model.head_dim) for matrix in (layer.q, layer.k, layer.v))
    return rotate(q, positions, model.theta), rotate(k, positions, model.theta), v


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of n queries to m >= n keys; the queries belong to the last n of the m tokens. -> [n, 9 * 64]

    Here n = m. Engine 2 calls this with fewer queries than keys."""
    group = q.shape[1] // k.shape[1]  # grouped-query attention: 3 query heads share each key and value head
    k, v = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))  # [9, m, 64]
    scores = q.transpose(0, 1) @ k.transpose(1, 2) / math.sqrt(q.shape[-1])  # [9, n, m]
    n, m = scores.shape[1:]
    future = torch.arange(m) > torch.arange(m - n, m)[:, None]  # a token sees itself and what comes before it
    weights = scores.masked_fill(future, -math.inf).softmax(dim=-1)
    return (weights @ v).transpose(0, 1).flatten(1)


def mlp(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """SwiGLU: one matrix decides (through silu(z) = z * sigmoid(z)) how much of the other passes."""
    gate = x @ layer.gate.T
    return (gate * torch.sigmoid(gate) * (x @ layer.up.T)) @ layer.down.T


def forward(model: Model, token_ids: list[int]) -> torch.Tensor:
    """The logits of the token after the last one, [vocabulary]."""
    positions = torch.arange(len(token_ids))
    x = model.embedding[token_ids]  # [n, 576]
    for layer in model.layers:
        q, k, v = project(model, layer, rms_norm(x, layer.attention_norm, model.eps), positions)
        x = x + attend(q, k, v) @ layer.out.T  # what each token collects from those before it
        x = x + mlp(layer, rms_norm(x, layer.mlp_norm, model.eps))  # what it makes of it, alone
    return (rms_norm(x[-1:], model.norm, model.eps) @ model.embedding.T)[0]


# ---- the loop --------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def run(model: Model, requests: list[Request]) -> Run:
    prompts = [model.encode(request.question) for request in requests]
    started = time.perf_counter()
    outputs: list[list[int]] = []
    num_passes = num_rows = 0
    for prompt, request in zip(prompts, requests):
        new: list[int] = []
        while len(new) < request.max_tokens and model.end_token not in new:
            logits = forward(model, prompt + new)  # everything, every time
            new.append(int(logits.argmax()))
            num_passes += 1
            num_rows += len(prompt) + len(new) - 1
        outputs.append(new)
    return Run(outputs, num_passes, num_rows, time.perf_counter() - started)


# ---- what is printed, the same in all three engines ------------------------------------------------------------------


def read_arguments(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[Request]]:
    parser.add_argument("--max-tokens", type=int, default=32, help="at most so many new tokens for each request")
    arguments = parser.parse_args()
    if arguments.max_tokens < 1:
        parser.error(f"--max-tokens {arguments.max_tokens}: must be at least 1")
    return arguments, [replace(r, max_tokens=min(r.max_tokens, arguments.max_tokens)) for r in REQUESTS]


def report(done: Run, tokenizer: Any) -> None:
    for number, token_ids in enumerate(done.outputs):
        print(f"request {number}: {token_ids} {tokenizer.decode(token_ids, skip_special_tokens=True)!r}")
    print(
        f"{done.num_new} new tokens in {done.seconds:.1f} s: {done.num_new / done.seconds:.1f} tokens/s, "
        f"{done.num_passes} passes, {done.num_rows} tokens computed"
    )


def main() -> None:
    _, requests = read_arguments(argparse.ArgumentParser(description="Engine 1: the plain loop without a cache."))
    model = load()
    report(run(model, requests), model.tokenizer)


if __name__ == "__main__":
    main()

# Exercises 1.1 to 1.3 are in README.md. Write the answers into exercises.py, then: python docs/learn/check.py 1
