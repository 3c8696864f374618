"""One calibration for all tests of this folder: it takes some seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanovllm.lowrank.compress.calibrate import Calibration
from tests.lowrank.rig import small_calibration


@pytest.fixture(scope="session")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    return small_calibration(tmp_path_factory.mktemp("compress"))


@pytest.fixture(scope="session")
def calib_path(calibration: Calibration) -> Path:
    return calibration.path
