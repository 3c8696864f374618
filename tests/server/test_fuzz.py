"""Bodies that no client means to send: made from the OpenAPI document (schemathesis) and by mutation (hypothesis).

Whatever comes, the answer is one of our statuses with one of our shapes, and nothing stays behind in the engine.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanovllm.server.app import BODIES
from tests.server.rig import Running

STATUSES = {200, 400, 404, 413, 429}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "the", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/tokenize": {"prompt": "the"},
    "/detokenize": {"tokens": [5]},
    "/v1/responses": {"input": "the", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
}
SMALL = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

numbers = st.one_of(st.integers(-5, 40), st.integers(), st.floats(), st.just(2**63), st.just(-(2**64)), st.just(1e308))
texts = st.one_of(st.text(max_size=8), st.sampled_from(["the", "\x00", "<|end|>", "text", "user", "a" * 2000]))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(["role", "content", "type", "text", "7"]), inner)
    ),
    max_leaves=6,
)


def check(answer: Any) -> None:
    assert answer.status_code in STATUSES, (answer.status_code, answer.text)
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in answer.text


@pytest.mark.parametrize("path", GOOD)
def test_wrong_values_in_right_fields(server: Running, path: str) -> None:
    names = st.sampled_from([*sorted(BODIES[path].model_fields), "unknown", "chat_template"])

    with server.http() as http:

        @SMALL
        @given(changes=st.dictionaries(names, values, max_size=3))
        def attempt(changes: dict[str, Any]) -> None:
            changes.pop("ignore_eos", None)
            data = json.dumps({**GOOD[path], **changes})
            check(http.post(path, content=data, headers={"content-type": "application/json"}))

        attempt()


@pytest.mark.parametrize("path", GOOD)
def test_damaged_bytes(server: Running, path: str) -> None:
    whole = json.dumps(GOOD[path]).encode()

    with server.http() as http:

        @SMALL
        @given(at=st.integers(0, len(whole)), cut=st.integers(0, 6), put=st.binary(max_size=6))
        def attempt(at: int, cut: int, put: bytes) -> None:
            data = whole[:at] + put + whole[at + cut :]
            check(http.post(path, content=data, headers={"content-type": "application/json"}))

        attempt()


@pytest.mark.filterwarnings("ignore")
def test_the_openapi_document(server: Running) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    limits = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    for operation in schema.get_all_operations():
        found = operation.ok()

        @limits
        @given(case=found.as_strategy())
        def attempt(case: Any) -> None:
            if isinstance(case.body, dict):
                lengths = {"max_tokens", "max_output_tokens"} & case.body.keys()
                case.body = {**case.body, **dict.fromkeys(lengths, 2)}
            answer = case.call(timeout=30)
            assert answer.status_code < 500, answer.text
            case.validate_response(answer, checks=[schemathesis.checks.not_a_server_error])

        attempt()
    assert len(schema["/v1/completions"]) == 1
