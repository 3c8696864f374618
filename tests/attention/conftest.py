"""No attention library is importable unless a test installs its fake, whatever this machine has."""

from __future__ import annotations

import pytest

from nanovllm.attention.flash_backend import find_kernels
from tests.attention import fakes


@pytest.fixture(autouse=True)
def no_libraries(monkeypatch: pytest.MonkeyPatch):
    fakes.uninstall_all(monkeypatch)
    yield
    find_kernels.cache_clear()
