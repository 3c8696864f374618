"""The default model itself on the CPU: what a user sees after the first command, and how far that is from its weights
in fp32.

Answers are recorded word for word. Wherever one of their tokens was chosen, the runner-up was at least 0.06 behind in
logprob, more than rounding can do, also that of inputs to 15 bits (0.005 at most over 1,000 tokens of README.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.ops.native.build import load_library
from nanovllm.runner import model_runner
from nanovllm.weights.checkpoint import open_checkpoint
from nanovllm.weights.resolve import resolve_model

ROOT = Path(__file__).resolve().parents[1]
CHAT = {
    "What is the capital of France?": "The capital of France is Paris.",
    "What is 2 + 2?": "The answer to this classic math problem is 4.",
    "Translate 'hello' to Spanish.": "Hola.",
    "What is the opposite of hot?": "The opposite of hot is cold. "
    "This is a fundamental concept in science and technology",
}
PLAIN = {
    "The capital of France is": " Paris.\n\nThe answer is: 2018-01",
    "1, 2, 3, 4, 5,": " 6, 7, 8, 9, 10,",
    "def fibonacci(n):": "\n    if n == 0:\n        return 1\n    return n * fib",
    "🙂🙂🙂": "🔴🔴🔴🔴🔴\ufffd",  # a red circle is three tokens, and 16 is no multiple of three
    "A B C D E F": " G H I K L P Q R S T U\n\nThe answer is",
}
GREEDY = SamplingParams(temperature=0, max_tokens=16)


@pytest.fixture(scope="module", autouse=True)
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2", device="cpu", max_num_seqs=16, max_model_len=512) as made:
        yield made


@pytest.fixture(scope="module")
def expanded() -> Iterator[LLM]:
    with LLM("smollm2", device="cpu", max_num_seqs=16, max_model_len=1100, quantization="none") as made:
        yield made


def test_chat(llm: LLM) -> None:
    """In one batch; then alone and with all but five tokens of the prompt in the prefix cache; then alone and anew."""
    questions = [[{"role": "user", "content": question}] for question in CHAT]
    outputs = llm.chat(questions, GREEDY, use_tqdm=False)
    assert [output["text"] for output in outputs] == list(CHAT.values())
    assert [output["finish_reason"] for output in outputs] == ["stop", "stop", "stop", "length"]
    end = llm.get_tokenizer().convert_tokens_to_ids("<|im_end|>")
    assert all(output["token_ids"][-1] == end for output in outputs[:3])
    for _ in range(2):
        assert [llm.chat(each, GREEDY, use_tqdm=False)[0]["text"] for each in questions] == list(CHAT.values())
        assert llm.reset_prefix_cache()


def test_plain_text_in_one_batch_and_alone(llm: LLM) -> None:
    outputs = llm.generate(list(PLAIN), GREEDY, use_tqdm=False)
    assert [output["text"] for output in outputs] == list(PLAIN.values())
    for prompt, text in PLAIN.items():
        assert llm.generate(prompt, GREEDY, use_tqdm=False)[0]["text"] == text


def test_streaming_shows_whole_characters(llm: LLM) -> None:
    llm.engine.add_request("x", "🙂🙂🙂", SamplingParams(temperature=0, max_tokens=9))
    seen = []
    while llm.engine.has_unfinished_requests():
        seen += [delta.outputs[0].text for delta in llm.engine.step()]
    assert seen == ["", "", "🔴", "", "", "🔴", "", "", "🔴"]


def test_chat_template_of_the_gguf(llm: LLM) -> None:
    output = llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=1), use_tqdm=False)[0]
    text = llm.get_tokenizer().decode(output.prompt_token_ids)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_logprobs_make_sense(expanded: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5, prompt_logprobs=0)
    output = expanded.generate("The capital of France is", params, use_tqdm=False)[0]
    best = list(output.outputs[0].logprobs[0].values())
    assert (best[0].decoded_token, best[0].rank) == (" Paris", 1)
    assert best[0].logprob == pytest.approx(-0.258, abs=2e-3)
    assert " London" in [entry.decoded_token for entry in best]
    known = [next(iter(position.values())) for position in output.prompt_logprobs[1:]]
    assert [entry.decoded_token for entry in known] == [" capital", " of", " France", " is"]
    assert known[1].logprob > -1 > known[0].logprob  # "of" was to be expected after "The capital", "capital" was not


def test_same_logprobs_as_transformers_with_the_same_weights(expanded: LLM) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    checkpoint = open_checkpoint(resolve_model("smollm2"))
    config = LlamaConfig(**{key: value for key, value in checkpoint.config.items() if key != "torch_dtype"})
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    state = {name: checkpoint.read(name).float() for name in checkpoint.names()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its table was on no device either
    prompt = expanded.get_tokenizer().encode(
        "It was a bright cold day in April, and the clocks were striking thirteen."
    )
    with torch.inference_mode():
        expected = model.eval()(torch.tensor([prompt])).logits[0].log_softmax(-1)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3)
    positions = expanded.generate([prompt], params, use_tqdm=False)[0].prompt_logprobs[1:]
    assert len(positions) > 10
    for i, position in enumerate(positions):
        for token_id, entry in position.items():
            assert entry.logprob == pytest.approx(expected[i, token_id].item(), abs=1e-3)
    checkpoint.close()


def stored(reader: Any, name: str) -> torch.Tensor:
    """A tensor as the gguf package reads it."""
    tensor = next(tensor for tensor in reader.tensors if tensor.name == name)
    return torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))


def test_loaded_weights_are_what_the_gguf_package_reads(expanded: LLM) -> None:
    reader = gguf.GGUFReader(str(resolve_model("smollm2")))
    parameters = dict(expanded.engine.executor.runner.model.named_parameters())
    assert torch.equal(parameters["embed.weight"], stored(reader, "token_embd.weight"))
    assert torch.equal(parameters["norm.weight"], stored(reader, "output_norm.weight"))
    for layer in (0, 14, 29):
        qkv = parameters[f"layers.{layer}.attention.qkv.weight"]  # 9 query, 3 key and 3 value heads of 64 rows
        assert torch.equal(qkv[768:], stored(reader, f"blk.{layer}.attn_v.weight"))
        for rows, heads, part in ((qkv[:576], 9, "q"), (qkv[576:768], 3, "k")):
            # in the file neighbouring rows turn together, in memory the two halves of a head
            pairs = stored(reader, f"blk.{layer}.attn_{part}.weight").view(heads, 32, 2, 576)
            assert torch.equal(rows.view(heads, 2, 32, 576), pairs.transpose(1, 2))
        gate_up = torch.cat([stored(reader, f"blk.{layer}.ffn_{part}.weight") for part in ("gate", "up")])
        assert torch.equal(parameters[f"layers.{layer}.mlp.gate_up.weight"], gate_up)
        down = stored(reader, f"blk.{layer}.ffn_down.weight")
        assert torch.equal(parameters[f"layers.{layer}.mlp.down.weight"], down)


def test_a_seed_repeats_four_different_completions(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=0.8, top_p=0.9, seed=1, max_tokens=8)
    first, again = (llm.generate("Hello", params, use_tqdm=False)[0] for _ in range(2))
    texts = [completion.text for completion in first.outputs]
    assert len(set(texts)) == 4
    assert [completion.text for completion in again.outputs] == texts


def readme_logprobs(llm: LLM, num_tokens: int = 1000) -> torch.Tensor:
    """[num_tokens - 1, vocabulary]: computed for `prompt_logprobs`, before the few that are wanted are taken."""
    token_ids = llm.get_tokenizer().encode((ROOT / "README.md").read_text(encoding="utf-8"))[:num_tokens]
    found: list[torch.Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        original = model_runner.prompt_logprobs

        def watched(logits: torch.Tensor, *more: Any) -> Any:
            found.append(logits.log_softmax(-1))
            return original(logits, *more)

        patch.setattr(model_runner, "prompt_logprobs", watched)
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        llm.generate([{"prompt_token_ids": token_ids}], params, use_tqdm=False)
    assert sum(map(len, found)) == num_tokens - 1
    return torch.cat(found)


@pytest.fixture(scope="module")
def readme(expanded: LLM) -> torch.Tensor:
    return readme_logprobs(expanded)


def test_quantised_products_keep_what_the_model_says(readme: torch.Tensor) -> None:
    with LLM("smollm2", device="cpu", max_num_seqs=16, max_model_len=1100) as llm:
        if llm.engine.describe()["runs_on"]["quantization"] == "none":
            pytest.skip("no C compiler: weights are expanded")
        assert_near(readme_logprobs(llm), readme, 0.99, 1e-5)


def assert_near(found: torch.Tensor, expected: torch.Tensor, agreement: float, divergence: float) -> None:
    """The share of positions with the same likeliest token, and the mean KL divergence."""
    assert (found.argmax(-1) == expected.argmax(-1)).float().mean() >= agreement
    assert (expected.exp() * (expected - found)).sum(-1).mean() <= divergence


@pytest.mark.skipif(isinstance(load_library(), str), reason="no C compiler")
@pytest.mark.parametrize(("kind", "agreement", "divergence"), [("float16", 0.99, 1e-5), ("int8", 0.95, 0.003)])
def test_a_small_kv_cache_keeps_what_the_model_says(
    readme: torch.Tensor, kind: str, agreement: float, divergence: float
) -> None:
    options = {"device": "cpu", "max_num_seqs": 16, "max_model_len": 1100, "quantization": "none"}
    with LLM("smollm2", kv_cache_dtype=kind, **options) as llm:
        found = readme_logprobs(llm, 400)
    assert not torch.equal(found, readme[:399])
    assert_near(found, readme[:399], agreement, divergence)
