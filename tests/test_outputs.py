"""RequestOutput reads like vLLM's record and like the small engines' dict."""

from __future__ import annotations

import pytest

from nanovllm import CompletionOutput, RequestOutput
from nanovllm.outputs import RequestMetrics


def make_output() -> RequestOutput:
    completions = [
        CompletionOutput(0, " hello", [7, 8], finish_reason="stop", stop_reason=8),
        CompletionOutput(1, " bye", [9]),
    ]
    return RequestOutput("r1", "say", [1, 2, 3], completions, finished=False, num_cached_tokens=2)


def test_items_are_those_of_the_first_completion_then_of_the_request() -> None:
    output = make_output()
    assert output["text"] == " hello"
    assert output["token_ids"] == [7, 8]
    assert output["finish_reason"] == "stop"
    assert output["stop_reason"] == 8
    assert output["prompt"] == "say"
    assert output["prompt_token_ids"] == [1, 2, 3]
    assert output["num_cached_tokens"] == 2
    with pytest.raises(KeyError, match="text"):
        output["txt"]


def test_finished_of_a_completion_is_its_reason() -> None:
    first, second = make_output().outputs
    assert (first.finished, second.finished) == (True, False)


def test_metrics_are_differences() -> None:
    assert RequestMetrics(10.0).time_to_first_token is None
    assert RequestMetrics(10.0).latency is None
    metrics = RequestMetrics(10.0, 10.5, 11.0, 14.0)
    assert (metrics.time_to_first_token, metrics.latency) == (1.0, 4.0)
