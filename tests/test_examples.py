"""The examples run as they stand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def run_example(name, folder):
    """Runs an example without arguments; returns what it prints."""
    run = subprocess.run(
        [sys.executable, EXAMPLES / name],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.slow
def test_custom_sft_loop_learns(tmp_path):
    lines = run_example("custom_sft_loop.py", tmp_path).splitlines()
    losses = [float(line.split("loss")[1].split()[0]) for line in lines if "loss" in line]
    assert losses[-1] < losses[0] - 1  # held-out against the first step


@pytest.mark.slow
def test_tree_sft_on_agent_turns_learns_and_shares(tmp_path):
    lines = [line.split() for line in run_example("tree_sft_agent_turns.py", tmp_path).splitlines()]
    steps = [words for words in lines if words[:2] == ["after", "step"]]
    losses, ratios = [float(words[4].rstrip(",")) for words in steps], [float(words[-1]) for words in steps]
    assert losses[-1] < losses[0] - 1
    assert min(ratios) > 2.5


@pytest.mark.slow
def test_custom_grpo_loop_earns_more(tmp_path):
    lines = [line.split() for line in run_example("custom_grpo_loop.py", tmp_path).splitlines()]
    rewards, ratios = ([float(words[words.index(name) + 1]) for words in lines] for name in ("reward", "ratio"))
    assert rewards[-1] > rewards[0] + 0.25
    assert all(abs(ratio - 1) < 1e-4 for ratio in ratios)  # each update is of what its own weights have drawn
