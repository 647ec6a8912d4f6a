"""`bench learning`: what it makes of the logs of runs; the job itself is tests/test_grpo.py's."""

import json
import sys

import pytest

from jaxtrl.bench import learning

LINES = [
    {"step": 0, "eval_reward": 0.1},
    {"step": 10, "reward": 0.2},
    {"step": 20, "reward": 0.4},
    {"step": 30, "reward": 0.5},
    {"step": 40, "reward": 0.9, "train_runtime": 1.0},
    {"step": 40, "eval_reward": 0.25},
]


def test_rewards_of_the_first_and_last_steps():
    measured = learning.rewards(LINES, 20, 1.0)
    want = {"first": 0.3, "last": 0.7, "gain": 0.4, "held_out_before": 0.1, "held_out_after": 0.25}
    assert measured == pytest.approx(want)
    assert learning.rewards(LINES, 10, -1.0)["gain"] == pytest.approx(-0.7)
    with pytest.raises(ValueError, match="no reward within --window steps"):
        learning.rewards(LINES, 5, 1.0)


def test_negated_reward():
    assert learning.negated_exact_match(completions=["1", "2"], answer=["1", None]) == [-1.0, None]


def test_each_seed_is_a_run_of_the_command_on_one_model(tmp_path, monkeypatch, capsys):
    """The command is replaced by one that logs what it was given."""
    script = f"""
import json, pathlib, sys
folder = next(pathlib.Path(a.partition("=")[2]) for a in sys.argv if a.startswith("--output_dir="))
seed = next(float(a.partition("=")[2]) for a in sys.argv if a.startswith("--seed="))
assert (folder / "tiny_sft" / "model.safetensors").is_file()
assert "--reward_funcs=jaxtrl.bench.learning.negated_exact_match" in sys.argv and "--max_steps=40" in sys.argv
lines = json.loads({json.dumps(json.dumps(LINES))})
lines = [{{name: -seed * value if "reward" in name else value for name, value in line.items()}} for line in lines]
(folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
"""
    (tmp_path / "tiny_sft").mkdir()
    (tmp_path / "tiny_sft" / "model.safetensors").touch()
    (tmp_path / "command.py").write_text(script)
    real = learning.subprocess.run

    def run(command, **options):
        assert command[1:3] == ["-m", "jaxtrl.grpo"]
        return real([sys.executable, str(tmp_path / "command.py"), *command[3:]], **options)

    monkeypatch.setattr(learning.subprocess, "run", run)
    flags = ["--seeds=2", "--negate", f"--output_dir={tmp_path}", "--max_steps=40"]
    assert learning.main(flags) == 0
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert [one["seed"] for one in result["runs"]] == [42, 43]
    assert [one["gain"] for one in result["runs"]] == pytest.approx([0.4 * 42, 0.4 * 43])
    assert result["held_out_after"]["mean"] == pytest.approx(0.25 * 42.5)
    assert result["curve"]["40"]["mean"] == pytest.approx(0.9 * 42.5)
    assert result["curve"]["40"]["std"] == pytest.approx(0.9 * 0.5**0.5)
    assert result["negated"]
