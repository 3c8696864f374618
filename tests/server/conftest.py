"""Servers for the tests that leave them as they found them: one start for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import openai
import pytest

from tests.server.rig import Running, make_talker, running, until
from tests.tiny_models import TinyModel


@pytest.fixture(scope="package")
def shared(llama: TinyModel) -> Iterator[Running]:
    with running(llama.path, max_n=16, max_prompts=8, max_waiting=64, max_body_mb=1) as server:
        yield server


@pytest.fixture
def server(shared: Running) -> Iterator[Running]:
    yield shared
    until(shared.is_empty)


@pytest.fixture(scope="package")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    """talker(with_tags) -> the folder of a model that has room for prompts with tools."""
    return cache(lambda with_tags: make_talker(tmp_path_factory.mktemp("models") / "talker", with_tags))


@pytest.fixture(scope="package")
def talking(talker: Callable[[bool], Path]) -> Iterator[Running]:
    with running(talker(True), {"num_kvcache_blocks": 600}) as server:
        yield server
        until(server.is_empty)


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.client() as made:
        yield made
