"""In bf16, whatever the batch and the backend, greedy output leaves the fp32 reference only at a near-tie (gaps.py)."""

from __future__ import annotations

from typing import Any

import pytest

from nanovllm.attention.sdpa import SdpaBackend
from tests.gaps import FAMILIES, Reference, Row, make_reference, measure

LENS = (1, 15, 16, 17, 40)


@pytest.fixture(scope="module", params=list(FAMILIES))
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Reference]:
    return request.param, make_reference(request.param, tmp_path_factory.mktemp("gaps"), LENS)


def run(reference: tuple[str, Reference], batch: int = 5, **options: Any) -> Row:
    return measure(*reference, batch, device="cpu", **options)


@pytest.mark.parametrize(
    ("backend", "batch", "options"),
    [("sdpa", 1, {}), ("sdpa", 5, {"max_num_batched_tokens": 7}), ("sdpa.math", 5, {})],
    ids=["sdpa-1", "sdpa-5-chunks", "sdpa.math-5"],
)
def test_bf16_differs_only_within_rounding(
    reference: tuple[str, Reference], backend: str, batch: int, options: dict[str, Any]
) -> None:
    row = run(reference, batch, attn_backend=backend, **options)
    assert row.backend == backend
    assert not row.faults(reference[1]), row


def test_fp32_does_not_differ(reference: tuple[str, Reference]) -> None:
    """The same measure, 16 bits more: every token, whatever its gap."""
    row = run(reference, dtype="float32")
    assert row.differing == 0
    assert row.error < 1e-4


def test_most_tokens_are_not_within_rounding(reference: tuple[str, Reference]) -> None:
    """Else the tests above would excuse anything."""
    known = reference[1]
    gaps = sorted(known.gap(i, n) for i, tokens in enumerate(known.tokens) for n in range(len(tokens)))
    assert gaps[len(gaps) // 2] > 2 * known.error


@pytest.mark.parametrize("fault", ["scale", "last key"])
def test_a_wrong_backend_is_found(
    reference: tuple[str, Reference], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Small faults: scores one eighth too large, or a decode that does not see the newest key."""
    original = SdpaBackend._sdpa

    def wrong(self: Any, q: Any, keys: Any, values: Any, spec: Any, **kwargs: Any) -> Any:
        if fault == "scale":
            q = q * 1.125
        elif kwargs.get("mask") is None and not kwargs.get("is_causal") and keys.shape[2] > 1:
            keys, values = keys[:, :, :-1], values[:, :, :-1]
        return original(self, q, keys, values, spec, **kwargs)

    monkeypatch.setattr(SdpaBackend, "_sdpa", wrong)
    assert run(reference, attn_backend="sdpa").faults(reference[1])
