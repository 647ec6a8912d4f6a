"""Two processes with two virtual devices each, over loopback: the run of one process, and an end that is no hang."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxtrl.train.checkpoint import find_checkpoints
from tests.processes import DEVICES, free_port, run

TIMED = ("tokens_per_second", "seconds", "runtime", "per_second", "programs", "program_")


def start(arguments, own=lambda process: []):
    """Both processes; `own(process)` are further arguments of each."""
    environment = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}"}
    return [
        subprocess.Popen(
            [sys.executable, "-m", *arguments, *own(process)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in range(2)
    ]


def records(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in line.items() if not any(part in k for part in TIMED)} for line in lines]
    return [record for record in kept if "loss" in record or "eval_loss" in record]


def assert_close(found, expected, rtol):
    """Losses to `rtol`, gradient norms and the rest (whose sums have another order) to 1e-5."""
    assert [list(record) for record in found] == [list(record) for record in expected]
    for one, other in zip(found, expected, strict=True):
        losses = [[value for name, value in record.items() if name.endswith("loss")] for record in (one, other)]
        np.testing.assert_allclose(*losses, rtol=rtol, err_msg=str(one))
        np.testing.assert_allclose(list(one.values()), list(other.values()), rtol=1e-5, err_msg=str(one))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model, the run of two processes (`two`) and that of one with four devices (`one`)."""
    from flax import nnx
    from transformers import AutoTokenizer

    from jaxtrl.assets import tokenizer_path
    from jaxtrl.model.config import Qwen3Config
    from jaxtrl.model.hf import save_pretrained
    from jaxtrl.model.qwen3 import Qwen3
    from tests import fixture_t

    folder = tmp_path_factory.mktemp("processes")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path())
    tokenizer.save_pretrained(folder / "model")
    config = {**fixture_t.CONFIG, "vocab_size": len(tokenizer)}
    save_pretrained(Qwen3(Qwen3Config.from_dict(config), rngs=nnx.Rngs(0)), folder / "model")
    options = {
        "compile_cache": str(folder / "cache"),
        "mesh": f"data=1,fsdp={2 * DEVICES}",
        "coordinator_address": f"127.0.0.1:{free_port()}",
        "num_processes": 2,
    }
    both = start(
        ["tests.processes", str(folder / "two")], lambda process: [json.dumps({**options, "process_id": process})]
    )
    outputs = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], "\n".join(outputs)
    (folder / "outputs.json").write_text(json.dumps(outputs))
    run(folder / "one", 2 * DEVICES, compile_cache=str(folder / "cache"))
    return folder


@pytest.mark.slow
def test_two_processes_train_and_evaluate_as_one(folder):
    two = records(folder / "two")
    assert len(two) == 10
    assert_close(two, records(folder / "one"), 1e-6)
    run(folder / "single", 1, compile_cache=str(folder / "cache"), eval_strategy="no", save_strategy="no")
    steps = [{k: v for k, v in record.items() if k != "padding_share"} for record in two if "loss" in record]
    single = [{k: v for k, v in record.items() if k != "padding_share"} for record in records(folder / "single")]
    assert_close(steps, single, 1e-5)


@pytest.mark.slow
def test_only_the_main_process_prints_and_the_model_is_whole(folder):
    from safetensors.numpy import load_file

    from jaxtrl.model.hf import load_params, params_to_hf

    main, other = json.loads((folder / "outputs.json").read_text())
    assert "step 8/8" in main
    assert "step" not in other
    model = load_file(folder / "two" / "model.safetensors")
    checkpoint = dict(params_to_hf(*load_params(folder / "two" / "checkpoint-8")))
    assert model.keys() == checkpoint.keys()
    for name, array in model.items():
        np.testing.assert_array_equal(array, checkpoint[name], err_msg=name)


@pytest.mark.slow
def test_a_checkpoint_of_two_processes_goes_on_in_one(folder):
    path = folder / "two" / "checkpoint-4"
    assert find_checkpoints(folder / "two")[0] == path
    trainer = run(
        folder / "resumed", 2 * DEVICES, resume_from_checkpoint=str(path), compile_cache=str(folder / "cache")
    )
    assert trainer.state.global_step == 8
    later = [record for record in records(folder / "two") if record["step"] > 4]
    assert_close(records(folder / "resumed"), later, 1e-6)


@pytest.mark.slow
def test_grpo_trains_each_prompt_of_an_epoch_once(folder):
    output = folder / "grpo"
    options = {
        "rollout": "inline",
        "compile_cache": str(folder / "cache"),
        "mesh": f"data=1,fsdp={2 * DEVICES}",
        "coordinator_address": f"127.0.0.1:{free_port()}",
        "num_processes": 2,
    }
    both = start(
        ["tests.processes", "grpo", str(output)], lambda process: [json.dumps({**options, "process_id": process})]
    )
    outputs = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], "\n".join(outputs)
    trained, other = (json.loads((output / f"trained-{process}.json").read_text()) for process in range(2))
    assert trained["steps"] == other["steps"]
    rows = [row for step in trained["steps"] for row in step]
    assert [sorted(rows[:8]), sorted(rows[8:])] == [[*range(8)]] * 2
    assert all({row % 2 for row in step} == {0, 1} for step in trained["steps"]), "a group of each process in a step"
    assert len(trained["logs"]) == 8 + 2 + 1
    for log, same in zip(trained["logs"], other["logs"], strict=True):
        assert log == pytest.approx(same, rel=1e-6)


def command_for_ever(folder, output):
    """Arguments of both processes: the command."""
    data = folder / "data.jsonl"
    data.write_text('{"text": "one two three"}\n' * 8)
    options = {
        "model_name_or_path": folder / "model",
        "dataset_name": data,
        "output_dir": output,
        "max_steps": 100_000,
        "per_device_train_batch_size": 1,
        "pad_to_multiple_of": "fixed:128",
        "logging_steps": 1,
        "save_strategy": "no",
        "compile_cache": folder / "cache",
        "coordinator_address": f"127.0.0.1:{free_port()}",
        "num_processes": 2,
        "heartbeat_timeout_seconds": 10,
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    return ["jaxtrl.sft", *flags], lambda process: [f"--process_id={process}"]


def script_for_ever(folder, output):
    """Arguments of both processes: a script, whose programs are compiled already."""
    options = {
        "max_steps": 100_000,
        "compile_cache": str(folder / "cache"),
        "mesh": f"data=1,fsdp={2 * DEVICES}",
        "eval_strategy": "no",
        "save_strategy": "no",
        "coordinator_address": f"127.0.0.1:{free_port()}",
        "num_processes": 2,
    }
    return ["tests.processes", str(output)], lambda process: [json.dumps({**options, "process_id": process})]


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "arguments"), [(0, script_for_ever), (1, command_for_ever)])
def test_a_killed_process_ends_the_other_with_a_sentence(folder, victim, arguments):
    output = folder / f"killed-{victim}"
    both = start(*arguments(folder, output))
    try:
        wait_until(lambda: is_training(output) or any(process.poll() is not None for process in both), 200)
        assert is_training(output), both[0].communicate()[0] if both[0].poll() else both[1].communicate()[0]
        both[victim].send_signal(signal.SIGKILL)
        begin = time.monotonic()
        text = both[1 - victim].communicate(timeout=120)[0]
        assert time.monotonic() - begin < 120
    finally:
        for process in both:
            process.kill()
            process.communicate()
    assert both[1 - victim].returncode == 1
    last = text.strip().splitlines()[-1]
    assert last.startswith(f"jaxtrl: error: process {1 - victim} of 2 ends because another one died"), text
    assert "start all of them again, with resume_from_checkpoint" in last


def is_training(output: Path) -> bool:
    file = output / "metrics.jsonl"
    return file.exists() and file.read_text().count('"loss"') >= 3


def wait_until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)


@pytest.mark.slow
def test_a_process_that_never_comes_is_a_sentence(tmp_path):
    flags = [
        f"--output_dir={tmp_path / 'out'}",
        f"--coordinator_address=127.0.0.1:{free_port()}",
        "--num_processes=2",
        "--process_id=0",
        "--initialization_timeout=2",
    ]
    done = subprocess.run([sys.executable, "-m", "jaxtrl.sft", *flags], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("jaxtrl: error: 2 processes did not meet within 2 s: start all of them with the same")
    assert not (tmp_path / "out").exists()
