"""What is proved while an engine is made: weights are complete, the cache fits, the backend is the one that runs."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import LLM, ConfigError, ModelError, SamplingParams
from nanovllm.attention.base import AttentionSpec
from nanovllm.attention.select import BACKENDS
from nanovllm.ops.native.build import load_library
from nanovllm.runner import kv_cache
from nanovllm.runner.kv_cache import CacheLayout, block_bytes
from nanovllm.weights.checkpoint import open_checkpoint
from nanovllm.weights.loader import load_weights
from nanovllm.weights.rules import Rule, find_destination
from tests.tiny_models import NEW_TOKENS, TinyModel, edit_config

MakeLLM = Callable[..., LLM]
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)


@pytest.fixture
def weights(llama_copy: Path) -> dict[str, torch.Tensor]:
    """The tensors of a model folder, to be changed; `write` puts them back."""
    return load_file(llama_copy / "model.safetensors")


def write(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")


# ---- Weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gone", "named"),
    [
        ("model.norm.weight", "norm.weight"),
        ("model.embed_tokens.weight", "embed.weight"),
        ("model.layers.1.self_attn.k_proj.weight", "layers.1.attention.qkv.weight[k]"),
        ("model.layers.0.mlp.up_proj.weight", "layers.0.mlp.gate_up.weight[up]"),
    ],
)
def test_a_missing_tensor_is_named(
    make_llm: MakeLLM, llama_copy: Path, weights: dict[str, torch.Tensor], gone: str, named: str
) -> None:
    del weights[gone]
    write(llama_copy, weights)
    with pytest.raises(ModelError) as error:
        make_llm(llama_copy)
    assert f"1 not found in the checkpoint: {named}" in str(error.value)
    assert str(llama_copy) in str(error.value)


@pytest.mark.parametrize(
    "extra",
    [
        "model.layers.2.input_layernorm.weight",  # a layer more than in config.json
        "model.layers.0.self_attn.q_proj.bias",  # none in config.json
        "model.layers.0.self_attn.q_norm.weight",  # another family's
        "xmodel.norm.weight",  # whole names count, not parts of them
        "model.norm.weight.x",
        "model.layers.00.input_layernorm.weight",
    ],
)
def test_an_extra_tensor_is_named(
    make_llm: MakeLLM, llama_copy: Path, weights: dict[str, torch.Tensor], extra: str
) -> None:
    weights[extra] = torch.zeros(8)
    write(llama_copy, weights)
    with pytest.raises(ModelError) as error:
        make_llm(llama_copy)
    assert f"1 in the checkpoint but not in the model: {extra}" in str(error.value)


def test_tensors_that_old_checkpoints_carry_are_accepted(
    make_llm: MakeLLM, llama: TinyModel, llama_copy: Path, weights: dict[str, torch.Tensor]
) -> None:
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    write(llama_copy, weights)
    outputs = make_llm(llama_copy).generate(llama.prompts, GREEDY, use_tqdm=False)
    assert [o["token_ids"] for o in outputs] == llama.tokens


@pytest.mark.parametrize("change", ["last number", "shape", "none"])
def test_a_head_that_differs_from_its_tied_embedding_is_warned_of(
    make_llm: MakeLLM,
    llama: TinyModel,
    llama_copy: Path,
    weights: dict[str, torch.Tensor],
    change: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """config.json decides: the embedding is the head, as in vLLM."""
    head = weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    if change == "last number":
        head[-1, -1] += 1
    elif change == "shape":
        weights["lm_head.weight"] = head[:-1]
    write(llama_copy, weights)
    outputs = make_llm(llama_copy).generate(llama.prompts, GREEDY, use_tqdm=False)
    assert [o["token_ids"] for o in outputs] == llama.tokens
    warnings = [record.getMessage() for record in caplog.records if "lm_head.weight" in record.getMessage()]
    assert len(warnings) == (change != "none")
    assert all("tie_word_embeddings" in line and str(llama_copy) in line for line in warnings)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_quantized_weights_without_a_config_are_refused_by_name(
    make_llm: MakeLLM, llama_copy: Path, weights: dict[str, torch.Tensor], dtype: torch.dtype, name: str
) -> None:
    """Cast like numbers they would give text without sense and without an error: their scales are not known."""
    weights[name] = weights[name].to(dtype)
    write(llama_copy, weights)
    with pytest.raises(ModelError) as error:
        make_llm(llama_copy)
    assert f"{name} is stored as " in str(error.value)
    assert "F32, F16, BF16, F64" in str(error.value)


def test_a_wrong_shape_is_named_with_both_shapes(
    make_llm: MakeLLM, llama_copy: Path, weights: dict[str, torch.Tensor]
) -> None:
    name = "model.layers.1.self_attn.v_proj.weight"
    weights[name] = weights[name][:-1]
    write(llama_copy, weights)
    with pytest.raises(ModelError, match=r"v_proj.weight.*\(23, 72\).*\(24, 72\)"):
        make_llm(llama_copy)


def test_a_config_of_another_size_is_refused(make_llm: MakeLLM, llama_copy: Path) -> None:
    edit_config(llama_copy, intermediate_size=81)
    with pytest.raises(ModelError, match="81"):
        make_llm(llama_copy)


class Doubled:
    """A checkpoint that offers one tensor twice."""

    def __init__(self, path: Path) -> None:
        self.inner = open_checkpoint(path)
        self.path = path

    def names(self) -> list[str]:
        return [*self.inner.names(), "model.norm.weight"]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_a_parameter_filled_twice_is_an_error(make_llm: MakeLLM, llama: TinyModel) -> None:
    model = make_llm().engine.executor.runner.model
    with pytest.raises(ModelError, match=r"norm.weight.*twice"):
        load_weights(model, Doubled(llama.path), model.rules)


def test_rules_match_whole_names_only() -> None:
    rules = (Rule("a.{i}.{part:q|k}.w", "x.{i}.w"), Rule("old.{i}", None))
    found = find_destination(rules, "a.12.k.w")
    assert found is not None
    assert (found.parameter, found.part) == ("x.12.w", "k")
    dropped = find_destination(rules, "old.3")
    assert dropped is not None
    assert dropped.parameter is None
    for name in ("a.12.v.w", "a.12.k.wx", "xa.12.k.w", "a..k.w", "a.1x.k.w", "a.1.kk.w", "aX1Xk.w", "a.-1.k.w"):
        assert find_destination(rules, name) is None, name


class Watched(Doubled):
    """Counts how many of the tensors it has handed out are still alive."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.handed_out: list[weakref.ref[torch.Tensor]] = []
        self.most_alive = 0

    def names(self) -> list[str]:
        return self.inner.names()

    def read(self, name: str) -> torch.Tensor:
        alive = sum(ref() is not None for ref in self.handed_out)
        tensor = self.inner.read(name)
        self.handed_out.append(weakref.ref(tensor))
        self.most_alive = max(self.most_alive, alive + 1)
        return tensor


def test_loading_holds_one_tensor_at_a_time(make_llm: MakeLLM, tiny: Callable[[str], TinyModel]) -> None:
    path = tiny("llama-sharded").path
    assert len(list(path.glob("*.safetensors"))) > 3
    model = make_llm(path).engine.executor.runner.model
    checkpoint = Watched(path)
    load_weights(model, checkpoint, model.rules)
    assert len(checkpoint.handed_out) == 30
    assert checkpoint.most_alive == 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_while_loading(tmp_path: Path) -> None:
    """240 MB in four shards: the peak of a fresh process is the model and at most one shard above where it began."""
    shard = {f"model.layers.{i}.x": torch.zeros(15_000_000) for i in range(4)}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"]}))
    for i, (name, tensor) in enumerate(shard.items()):
        save_file({name: tensor}, tmp_path / f"model-{i}.safetensors")
    script = f"""
import torch
from pathlib import Path
from nanovllm.weights.checkpoint import open_checkpoint
from nanovllm.weights.loader import load_weights
from nanovllm.weights.rules import Rule
def anonymous():  # what is ours alone; mapped files can be dropped at any time
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) // 1024
class Part(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(15_000_000), requires_grad=False)
before = anonymous()
model = torch.nn.ModuleList([Part() for _ in range(4)])
checkpoint = open_checkpoint(Path({str(tmp_path)!r}))
peak, read = 0, checkpoint.read
def watched(name):
    global peak
    tensor = read(name)
    peak = max(peak, anonymous())
    return tensor
checkpoint.read = watched
load_weights(model, checkpoint, (Rule("model.layers.{{i}}.x", "{{i}}.weight"),))
print(max(peak, anonymous()) - before)
"""
    grown = int(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)
    assert 200 <= grown <= 240 + 60 + 20


# ---- dummy weights ---------------------------------------------------------------------------------------------------


@pytest.fixture
def config_only(llama: TinyModel, tmp_path: Path) -> Path:
    folder = tmp_path / "config-only"
    folder.mkdir()
    (folder / "config.json").write_text((llama.path / "config.json").read_text())
    return folder


def test_dummy_weights_need_a_config_only(make_llm: MakeLLM, config_only: Path) -> None:
    def made(seed: int) -> tuple[dict[str, torch.Tensor], list[int]]:
        llm = make_llm(config_only, load_format="dummy", skip_tokenizer_init=True, seed=seed)
        tokens = llm.generate([5, 6, 7], GREEDY, use_tqdm=False)[0]["token_ids"]
        return dict(llm.engine.executor.runner.model.named_parameters()), tokens

    (first, tokens), (same, same_tokens), (other, _) = made(1), made(1), made(2)
    assert tokens == same_tokens
    for name, parameter in first.items():
        assert torch.equal(parameter, same[name]), name
        assert not torch.equal(parameter, other[name]), name
        assert parameter.abs().max() <= 1e-3
        assert parameter.std() > 1e-4, name  # drawn, not zero
    values = list(first.values())
    assert not any(torch.equal(a, b) for a, b in pairwise(values) if a.shape == b.shape)


def test_without_weights_the_error_has_the_remedy(make_llm: MakeLLM, config_only: Path) -> None:
    with pytest.raises(ModelError, match="load_format='dummy'"):
        make_llm(config_only, skip_tokenizer_init=True)
    with pytest.raises(ModelError, match="tokenizer"):
        make_llm(config_only, load_format="dummy")


# ---- Cache size -------------------------------------------------------------------------------------------

SPECS = [AttentionSpec(4, 2, 8, torch.float32)] * 3
PER_BLOCK = 3 * 2 * 16 * 2 * 8 * 4  # layers, K and V, tokens, KV heads, head_dim, bytes


def test_cache_size_is_the_minimum_over_ranks() -> None:
    assert block_bytes(SPECS, 16) == PER_BLOCK
    layout = CacheLayout.fit([10 * PER_BLOCK, 7 * PER_BLOCK + 5, 99 * PER_BLOCK], SPECS, 16, None)
    assert (layout.num_blocks, layout.num_tokens, layout.num_bytes) == (7, 112, 7 * PER_BLOCK)
    assert CacheLayout.fit([7 * PER_BLOCK], SPECS, 16, 7).num_blocks == 7
    assert CacheLayout.fit([7 * PER_BLOCK], SPECS, 16, 3).num_blocks == 3


@pytest.mark.parametrize("free", [0, PER_BLOCK - 1, -5 * 2**30])
def test_no_room_is_an_error_with_the_room_there_is(free: int) -> None:
    for wanted in (None, 1):
        with pytest.raises(ConfigError, match=r"\b0 MiB are left.*gpu_memory_utilization"):
            CacheLayout.fit([10 * PER_BLOCK, free], SPECS, 16, wanted)


def test_asking_for_too_many_blocks_says_how_many_fit() -> None:
    with pytest.raises(ConfigError, match=r"num_kvcache_blocks=8 .*at most 7 blocks"):
        CacheLayout.fit([7 * PER_BLOCK], SPECS, 16, 8)


def test_a_cpu_cache_is_no_larger_than_can_be_used(make_llm: MakeLLM) -> None:
    llm = make_llm(num_kvcache_blocks=None, max_num_seqs=3, max_model_len=40, kvcache_block_size=16)
    assert llm.engine.executor.layout.num_blocks == 3 * 3
    small = make_llm(num_kvcache_blocks=None, cpu_kvcache_gb=1e-4, kvcache_block_size=16)
    assert small.engine.executor.layout.num_bytes <= 1e-4 * 2**30
    with pytest.raises(ConfigError, match="cpu_kvcache_gb"):
        make_llm(num_kvcache_blocks=None, cpu_kvcache_gb=1e-6)


def test_a_process_without_memory_for_the_cache(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise MemoryError

    monkeypatch.setattr(kv_cache.np, "zeros", refuse)
    with pytest.raises(ConfigError, match=r"no memory for a KV cache of \d.*cpu_kvcache_gb .*ulimit -v"):
        make_llm()


AUTO = "sdpa" if isinstance(load_library(), str) else "native"  # native needs a C compiler


# ---- Backends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wanted", "runs"), [("auto", AUTO), ("sdpa", "sdpa"), ("sdpa.math", "sdpa.math")])
def test_the_backend_that_is_reported_is_the_one_that_runs(
    make_llm: MakeLLM, llama: TinyModel, monkeypatch: pytest.MonkeyPatch, wanted: str, runs: str
) -> None:
    ran: set[str] = set()
    for kind in {type(backend) for backend in BACKENDS if "attend" in vars(type(backend))}:

        def watched(self: Any, *args: Any, attend: Any = kind.attend) -> torch.Tensor:
            ran.add(self.name)
            return attend(self, *args)

        monkeypatch.setattr(kind, "attend", watched)
    llm = make_llm(attn_backend=wanted)
    llm.generate(llama.prompts[:3], GREEDY, use_tqdm=False)
    description = llm.engine.describe()
    assert ran == {runs}
    assert description["runs_on"]["attn_backend"] == runs
    assert description["runs_on"]["attn_reasons"][runs].startswith("chosen")
    assert set(description["runs_on"]["attn_reasons"]) == {backend.name for backend in BACKENDS}
    json.dumps(description)  # benches print it


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU refuses GPU backends")
def test_a_backend_that_cannot_run_here_is_an_error_with_the_reason(make_llm: MakeLLM) -> None:
    with pytest.raises(ConfigError, match=r"attn_backend='triton' cannot be used here: refused: .+"):
        make_llm(attn_backend="triton")
    with pytest.raises(ConfigError, match=r"device='cuda'.*device='cpu'"):
        make_llm(device="cuda")
