"""SIGKILL at any moment, also while a checkpoint is being written; the resumed run ends bit for bit as the whole one.

The first start says `auto`, which begins a run where there is none; every later one `true`, unless the kill came before
the command had left anything in its folder (then there is no run to continue, and `true` says so).

JAXTRL_KILLS=20 kills more often than the 5 times of the suite; JAXTRL_KILL_SEED draws other moments.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxtrl.assets import sample_data_path
from jaxtrl.train.checkpoint import TEMPORARY, find_checkpoints

KILLS = int(os.environ.get("JAXTRL_KILLS", "5"))
SEED = int(os.environ.get("JAXTRL_KILL_SEED", "0"))
STEPS = 8 * KILLS  # a kill comes after about four more steps, so that it finds a run at work


def command(output: Path, cache: Path, data: Path) -> list[str]:
    begun = output.exists() and any(output.iterdir())
    options = {
        "output_dir": output,
        "compile_cache": cache,
        "dataset_name": data,
        "max_steps": STEPS,
        "per_device_train_batch_size": 1,
        "max_length": 128,
        "logging_steps": 3,
        "save_steps": 2,
        "save_total_limit": 2,
        "resume_from_checkpoint": "true" if begun else "auto",
    }
    return [sys.executable, "-m", "jaxtrl.sft", *(f"--{name}={value}" for name, value in options.items())]


def start(*args) -> subprocess.Popen:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # one device
    return subprocess.Popen(
        command(*args), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(*args) -> str:
    process = start(*args)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    return output


def losses(output: Path) -> list[tuple]:
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "epoch", "loss", "grad_norm", "num_tokens", "train_loss")
    # A program is compiled again by each process, so its line says nothing about the training.
    return [tuple(record.get(name) for name in names) for record in records if "program" not in record]


def newest(output: Path) -> int:
    found = find_checkpoints(output)
    return int(found[-1].name.rpartition("-")[2]) if found else 0


def kill_somewhere(process: subprocess.Popen, output: Path, rng: random.Random, while_saving: bool) -> None:
    """SIGKILL after some more checkpoints and a random time, or as soon as a half-written checkpoint is seen."""
    goal = newest(output) + rng.choice((2, 4, 6))
    deadline = time.monotonic() + 120
    while newest(output) < min(goal, STEPS - 4) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    if while_saving:
        while not any(TEMPORARY in path.name for path in output.glob("checkpoint-*")) and process.poll() is None:
            assert time.monotonic() < deadline, "no checkpoint was written"
            time.sleep(0.0002)
        time.sleep(rng.uniform(0, 0.02))
    else:
        time.sleep(rng.uniform(0, 0.1))
    process.send_signal(signal.SIGKILL)
    process.communicate()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_run_ends_as_if_it_had_not_been_killed(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(sample_data_path().read_text().splitlines(keepends=True)[:180]))
    cache, whole, killed = tmp_path / "cache", tmp_path / "whole", tmp_path / "killed"
    finish(whole, cache, data)
    rng, at_work, left_half_written = random.Random(SEED), 0, 0
    for kill in range(KILLS):
        process = start(killed, cache, data)
        if kill == 0:  # while it starts: nothing is saved yet
            time.sleep(rng.uniform(0.5, 4))
            process.send_signal(signal.SIGKILL)
            process.communicate()
        else:
            kill_somewhere(process, killed, rng, while_saving=kill % 2 == 1)
        at_work += newest(killed) < STEPS
        left_half_written += any(TEMPORARY in path.name for path in killed.glob("checkpoint-*"))
    assert at_work > KILLS / 2, "the run was mostly over before it was killed"
    assert left_half_written, "no kill hit a checkpoint that was being written"
    output = finish(killed, cache, data)
    assert f"resuming from {killed}" in output
    assert ": compiled in" not in output, "a resumed run has the programs of the whole one, from the cache"
    assert losses(killed) == losses(whole)
    assert [step for step, *_ in losses(killed)] == [*range(3, STEPS + 1, 3), STEPS]
    assert (killed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert [path.name for path in find_checkpoints(killed)] == [f"checkpoint-{STEPS - 2}", f"checkpoint-{STEPS}"]
    assert not [path for path in killed.iterdir() if TEMPORARY in path.name or path.name.endswith(".removed")]
