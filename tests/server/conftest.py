"""One server for the tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.server.rig import Running, running, until
from tests.tiny_models import TinyModel


@pytest.fixture(scope="module")
def shared(llama: TinyModel) -> Iterator[Running]:
    with running(llama.path, max_n=16, max_prompts=8, max_waiting=64, max_body_mb=1) as server:
        yield server


@pytest.fixture
def server(shared: Running) -> Iterator[Running]:
    yield shared
    until(shared.is_empty)


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.client() as made:
        yield made
