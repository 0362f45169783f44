"""Runs `tests/sharded`, whose tests need 8 devices, in a process that has them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(path.name for path in (ROOT / "tests" / "sharded").glob("test_*.py"))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "speed", ["not slow", pytest.param("slow", marks=pytest.mark.slow)], ids=["quick", "slow"]
)
def test_on_eight_devices(name, speed):
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-m", speed, f"tests/sharded/{name}"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    nothing = done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED and "deselected" in done.stdout
    assert done.returncode == 0 or nothing, done.stdout + done.stderr
