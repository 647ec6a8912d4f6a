"""The examples run as they stand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.mark.slow
def test_custom_sft_loop_learns(tmp_path):
    run = subprocess.run(
        [sys.executable, EXAMPLES / "custom_sft_loop.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    losses = [float(line.split("loss")[1].split()[0]) for line in run.stdout.splitlines() if "loss" in line]
    assert losses[-1] < losses[0] - 1  # held-out against the first step
