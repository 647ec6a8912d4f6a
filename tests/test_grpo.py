"""`python -m jaxtrl.grpo` as a new user meets it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxtrl import grpo
from jaxtrl.assets import prompts_path
from jaxtrl.trainers.arguments import parse
from jaxtrl.trainers.grpo_config import AsyncGRPOConfig

ROOT = Path(__file__).parents[1]
# One device, not the virtual ones of other tests.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}


def sentence(argv, capsys):
    """Exit code and the one line on stderr."""
    try:
        code = grpo.main(argv)
    except SystemExit as error:  # argparse
        code = error.code
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("python -m jaxtrl.grpo: error: ")
    return code, lines[0].removeprefix("python -m jaxtrl.grpo: error: ")


def test_wrong_input_is_one_sentence(tmp_path, capsys):
    out = f"--output_dir={tmp_path / 'out'}"
    assert sentence([out, "--vllm_mode=server"], capsys)[1].startswith("not supported by jaxtrl: vllm_mode (")
    assert "did you mean 'num_generations'" in sentence([out, "--num_generation=8"], capsys)[1]
    assert "needs rollout ray" in sentence([out, "--ray_address=auto"], capsys)[1]
    code, text = sentence([out, f"--model_name_or_path={tmp_path / 'none'}", "--dataset_name=x.jsonl"], capsys)
    assert (code, "is not a folder" in text) == (1, True)


def test_flags_of_the_default_give_a_configuration():
    args, rewards = parse([AsyncGRPOConfig, grpo.RewardOptions], grpo.tiny_flags([]))
    assert args.groups_per_step(1) == args.per_device_train_batch_size // args.num_generations
    assert rewards.reward_funcs == ["exact_match"]
    assert grpo.tiny_flags(["--config", "x.yaml"]) == []
    (both,) = parse([grpo.RewardOptions], ["--reward_funcs=exact_match,asyncio.run"])
    assert both.reward_funcs == ["exact_match", "asyncio.run"]


def test_grpo_tiny_says_what_no_arguments_mean():
    by_file = parse([AsyncGRPOConfig, grpo.RewardOptions], [f"--config={ROOT / 'configs' / 'grpo_tiny.yaml'}"])
    by_flags = parse([AsyncGRPOConfig, grpo.RewardOptions], grpo.tiny_flags([]))
    assert by_file == by_flags


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(folder, command line but for output_dir) of a run of 8 steps over 64 prompts with a model that knows nothing."""
    from jaxtrl.model.hf import save_pretrained
    from jaxtrl.trainers.model_source import tiny_model

    folder = tmp_path_factory.mktemp("tiny")
    model, tokenizer = tiny_model(0)
    save_pretrained(model, folder / "model")
    tokenizer.save_pretrained(folder / "model")
    lines = prompts_path().read_text(encoding="utf-8").splitlines()[:64]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = {
        "model_name_or_path": folder / "model",
        "dataset_name": folder / "prompts.jsonl",
        "compile_cache": folder / "cache",
        "reward_funcs": "length_reward",
        "num_train_epochs": 1,
        "per_device_train_batch_size": 16,
        "num_generations": 2,
        "max_completion_length": 8,
        "max_staleness": 1,
        "save_steps": 2,
        "learning_rate": 1e-4,
    }
    (folder / "record.py").write_text(RECORD, encoding="utf-8")
    flags = [f"--{name}={value}" for name, value in options.items()]
    return folder, [sys.executable, str(folder / "record.py"), *flags]


RECORD = """
import json, sys

if __name__ == "__main__":
    from jaxtrl import grpo
    from jaxtrl.trainers.grpo_trainer import AsyncGRPOTrainer

    make_batch = AsyncGRPOTrainer._make_batch

    def record(self, scored):
        with open(self.args.output_dir + ".trained", "a") as file:
            print(json.dumps([self.state.global_step, [group.row for group in scored.groups]]), file=file)
        return make_batch(self, scored)

    AsyncGRPOTrainer._make_batch = record
    sys.exit(grpo.main())
"""


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["trainer", "worker"])
def test_a_killed_run_goes_on_and_trains_every_prompt_once(tiny, victim):
    """What was trained after the newest checkpoint is undone with it, and trained again."""
    out, command = tiny[0] / victim, [*tiny[1], f"--output_dir={tiny[0] / victim}"]
    trained = out.with_suffix(".trained")
    run = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not list(out.glob("checkpoint-2")) and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    workers = _children(run.pid)
    (worker,) = (pid for pid in workers if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(run.pid if victim == "trainer" else worker, signal.SIGKILL)
    assert run.wait(timeout=60) == (-signal.SIGKILL if victim == "trainer" else 1)
    deadline = time.monotonic() + 20
    while any(map(_is_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(_is_alive, workers)), "the worker ends with the trainer"
    kept = max(int(path.name.rpartition("-")[2]) for path in out.glob("checkpoint-?"))
    before = [rows for step, rows in lines_of(trained) if step < kept]
    trained.unlink()
    done = subprocess.run(
        [*command, "--resume_from_checkpoint=true"],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    after = [rows for _, rows in lines_of(trained)]
    assert len(before) == kept
    assert sorted(row for rows in before + after for row in rows) == list(range(64))
    logs = [line for line in lines_of(out / "metrics.jsonl") if "reward" in line]
    assert [line["step"] for line in logs] == list(range(1, 9))
    assert logs[-1]["epoch"] == 1.0
    assert max(line["sample/staleness_max"] for line in logs) <= 1


def _children(pid):
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _parent(entry) == pid]


def _parent(entry):
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return None


def _is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
