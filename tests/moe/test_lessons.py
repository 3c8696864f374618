"""Lessons 31, 32 and 34 of engines like this one, through the whole engine on the CPU. (33 is about compressing
experts.)"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm import LLM, ModelError, SamplingParams
from nanovllm.hardware.device import Device
from nanovllm.memory.budget import GIB
from nanovllm.moe.offload import store as store_module
from nanovllm.moe.offload.offload import Offload

TRAINED = Path(__file__).resolve().parents[1] / "fixtures/tiny-mixtral"
EXPERT_BYTES = 3 * 128 * 256 * 4
PART_BYTES = 128 * 256 * 2  # one matrix as it is stored, in bf16
LAYERS, TOP_K = 4, 2
PROMPT = [700, 12, 900, 44]
TIERS = {"memory": 32, "disk": 0, "mixed": 13}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module.logger, "level", logging.ERROR)


def make(num_buffers: int, num_in_host: int = 32, **options: Any) -> LLM:
    gigabytes = {
        "expert_cache_gb": num_buffers * EXPERT_BYTES / GIB,
        "expert_host_gb": num_in_host * EXPERT_BYTES / GIB,
    }
    defaults = {
        "device": "cpu",
        "skip_tokenizer_init": True,
        "max_model_len": 160,
        "max_num_seqs": 4,
        "num_kvcache_blocks": 32,
        **gigabytes,
    }
    return LLM(str(TRAINED), **{**defaults, **options})


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def decode(llm: LLM, num_tokens: int) -> Iterator[None]:
    """One sequence; the prompt is done before the first yield, and one token is decoded between two of them."""
    llm.engine.add_request("one", PROMPT, greedy(num_tokens))
    llm.engine.step()
    while llm.engine.has_unfinished_requests():
        yield
        llm.engine.step()


# ---- lesson 31 -------------------------------------------------------------------------------------------------------


def global_lru_hits(choices: list[tuple[int, int]], num_buffers: int) -> int:
    buffers: OrderedDict[tuple[int, int], None] = OrderedDict()
    hits = 0
    for key in choices:
        hits += key in buffers
        buffers[key] = None
        buffers.move_to_end(key)
        if len(buffers) > num_buffers:
            buffers.popitem(last=False)
    return hits


@pytest.mark.parametrize("policy", ["lfu", "lru"])
def test_fewer_buffers_than_a_token_touches_still_hit(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lesson 31: a global LRU with fewer buffers than a token touches (8 here) never hits in single-sequence decode. On
    the same choices of experts, buffers with a quota per layer do."""
    num_buffers = LAYERS * TOP_K - 2
    with make(num_buffers, expert_policy=policy) as llm:
        offload, choices = llm.engine.executor.offload, []
        select = offload.cache.select

        def watched(layer: int, token_counts: dict[int, int], *rest: Any) -> Any:
            choices.extend((layer, expert) for expert in token_counts)
            return select(layer, token_counts, *rest)

        monkeypatch.setattr(offload.cache, "select", watched)
        steps = decode(llm, 100)
        next(steps)
        before = llm.engine.executor.expert_stats()
        choices.clear()
        list(steps)
        stats = llm.engine.executor.expert_stats() - before
    assert stats.hits + stats.misses == len(choices) == 99 * LAYERS * TOP_K
    assert global_lru_hits(choices, num_buffers) == 0
    assert stats.hit_rate > 0.1


# ---- lesson 32 -------------------------------------------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """The largest tensor that was made: its memory is none of the arguments'."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.num_ops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        known = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        self.num_ops += 1
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return out


def test_the_watch_sees_an_allocation() -> None:
    with Allocations() as seen, torch.inference_mode():
        torch.empty(PART_BYTES, dtype=torch.uint8)[:5].view(5)
    assert (seen.largest, seen.num_ops) == (PART_BYTES, 3)


@pytest.mark.parametrize("tier", TIERS)
def test_a_miss_in_a_running_engine_allocates_nothing(tier: str) -> None:
    """Lesson 32: a miss built a random nn.Linear first. From disk, converting from bf16 to fp32, too."""
    with make(4, TIERS[tier]) as llm:
        steps = decode(llm, 12)
        next(steps)
        before = llm.engine.executor.expert_stats()
        with Allocations() as seen:
            list(steps)
        assert (llm.engine.executor.expert_stats() - before).misses > 40
    assert seen.num_ops > 500
    assert seen.largest < PART_BYTES


@pytest.mark.parametrize("tier", TIERS)
def test_eviction_moves_nothing_and_the_host_waits_once_a_layer(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lesson 32: eviction copied experts back and called empty_cache(); the host waited for every expert and token.
    Only host memory that holds some experts and not others gets any back, each for another one."""
    with make(5) as llm:
        truth = {
            (layer, e): block.tensor.clone()
            for layer, held in enumerate(llm.engine.executor.offload.store.held)
            for e, block in held.items()
        }
    released: list[int] = []
    monkeypatch.setattr(Device, "release_cached", lambda self: released.append(1))
    file = TRAINED / "model.safetensors"
    file_before = (file.stat().st_mtime_ns, file.stat().st_size)
    with make(5, TIERS[tier]) as llm:
        offload = llm.engine.executor.offload
        stream, downloads, targets = offload.stream, [], []
        download, copy = stream.download, stream.copy
        monkeypatch.setattr(stream, "download", lambda t: downloads.append(t.numel()) or download(t))
        monkeypatch.setattr(stream, "copy", lambda t, s: targets.append(t.data_ptr()) or copy(t, s))
        blocks = {block.tensor.data_ptr() for held in offload.store.held for block in held.values()}
        assert len(blocks) == TIERS[tier]
        list(decode(llm, 20))
        assert len(downloads) == 20 * LAYERS  # a prompt and 19 tokens
        assert max(downloads) <= len(PROMPT) * TOP_K * 3  # the choices and the guesses of two layers: no experts
        first = offload._views[0][0].data_ptr()
        last = first + 5 * EXPERT_BYTES
        stats = llm.engine.executor.expert_stats()
        assert len(targets) >= stats.misses > 50
        back = [target for target in targets if not first <= target < last]
        assert set(back) <= blocks, "copies go to buffers, or to host memory, and nowhere else"
        assert len(back) * EXPERT_BYTES == stats.bytes_saved
        assert (0 < len(back) < stats.misses / 4) == (tier == "mixed")
        held = [(layer, expert) for layer, experts in enumerate(offload.store.held) for expert in experts]
        assert len(held) == TIERS[tier]
        assert all(torch.equal(offload.store.block(*key), truth[key]) for key in held)
        assert not released
    assert (file.stat().st_mtime_ns, file.stat().st_size) == file_before


# ---- lesson 34; its other half, Mixtral on several ranks, is tests/ranks/test_experts.py --------------------------


@pytest.mark.parametrize("tier", TIERS)
def test_experts_without_a_place_are_an_error_and_not_zeros(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lesson 34: a missing expert manager returned zeros. Nowhere to put them, and places that nothing fills."""
    with monkeypatch.context() as patch:
        patch.setattr(Offload, "places", lambda self: {})
        with pytest.raises(ModelError, match=r"96 in the checkpoint but not in the model: .*experts\.0\.w1"):
            make(6, TIERS[tier])
    places = Offload.places
    with monkeypatch.context() as patch:
        one_more = {"layers.9.mlp.experts.down.weight": {"0": torch.empty(128, 256)}}
        patch.setattr(Offload, "places", lambda self: {**places(self), **one_more})
        with pytest.raises(ModelError, match=r"1 not found in the checkpoint: layers\.9\.mlp\.experts\.down"):
            make(6, TIERS[tier])


def test_an_expert_on_disk_that_nobody_located_is_an_error_and_not_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lesson 34, with a loader that forgets to tell."""
    monkeypatch.setattr(store_module.logger, "level", logging.CRITICAL)
    with make(6, 0) as llm:
        for file in llm.engine.executor.offload.store._files.values():
            file.parts.clear()
        output = llm.generate(PROMPT, greedy(4), use_tqdm=False)[0]
        assert output.error is not None
        assert "the loader has told where it is" in output.error
        assert output["token_ids"] == []


@pytest.mark.parametrize("tier", TIERS)
def test_every_expert_that_is_chosen_counts(tier: str) -> None:
    """Lesson 34: were one ignored, erasing it would change nothing. One expert of each layer, in its buffer or place."""
    outputs = []
    for expert in (None, 0, 7):
        with make(6, TIERS[tier]) as llm:
            send = llm.engine.executor.offload.store.send

            def erased(
                layer: int,
                which: int,
                start: int,
                stop: int,
                memory: torch.Tensor,
                gone: Any = expert,
                send: Any = send,
            ) -> None:
                send(layer, which, start, stop, memory)
                if which == gone:
                    memory[start:stop].zero_()

            llm.engine.executor.offload.store.send = erased
            params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
            outputs.append(llm.generate(list(range(100, 160)), params, use_tqdm=False)[0].prompt_logprobs)
    assert outputs[0] != outputs[1] != outputs[2] != outputs[0]
