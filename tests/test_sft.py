"""`python -m jaxtrl.sft` as a new user meets it: wrong input is one sentence on stderr, and the default job learns."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from jaxtrl import sft
from jaxtrl.assets import tokenizer_path
from jaxtrl.trainers.arguments import parse
from jaxtrl.trainers.sft_config import SFTConfig

CONFIGS = Path(__file__).parents[1] / "configs"
CHAT = '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}\n'


def sentence(argv, capsys):
    """Exit code and the one line on stderr."""
    try:
        code = sft.main(argv)
    except SystemExit as error:  # argparse
        code = error.code
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("python -m jaxtrl.sft: error: ")
    return code, lines[0].removeprefix("python -m jaxtrl.sft: error: ")


@pytest.fixture
def options(tmp_path):
    return [f"--output_dir={tmp_path / 'out'}", f"--compile_cache={tmp_path / 'cache'}", "--max_steps=1"]


def test_wrong_model_path(options, tmp_path, capsys):
    missing = tmp_path / "no" / "such" / "model"
    code, text = sentence([*options, f"--model_name_or_path={missing}", "--dataset_name=x.jsonl"], capsys)
    assert code == 1
    assert text == f"{missing} is not a folder: give a checkpoint folder or a Hugging Face hub id", "not the data"


def test_what_is_wrong_besides_the_data_is_said_before_it_is_read(options, tmp_path, capsys):
    from jaxtrl.hardware.compile_cache import enable_compile_cache
    from jaxtrl.model.hf import save_pretrained
    from jaxtrl.trainers.model_source import tiny_model

    enable_compile_cache(str(tmp_path / "cache"))
    model = tmp_path / "model"
    save_pretrained(tiny_model(0)[0], model)
    argv = [*options, f"--model_name_or_path={model}", "--dataset_name=absent.jsonl"]
    assert "has no tokenizer" in sentence(argv, capsys)[1]
    assert "There is no checkpoint at" in sentence([*argv, f"--resume_from_checkpoint={tmp_path / 'gone'}"], capsys)[1]
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "is truncated" in sentence(argv, capsys)[1]
    assert "cannot be made" in sentence([*argv, f"--output_dir={weights}"], capsys)[1]


def test_empty_names_are_said(options, capsys):
    """As of a shell's variable that is not set."""
    assert "the data set's name is empty" in sentence([*options, "--dataset_name="], capsys)[1]
    assert "the model's name is empty" in sentence([*options, "--model_name_or_path=", "--dataset_name=x"], capsys)[1]


def test_a_mistyped_folder_is_not_resumed(options, tmp_path, capsys):
    code, text = sentence([*options, "--resume_from_checkpoint=true"], capsys)
    assert code == 1
    assert f"output_dir {tmp_path / 'out'} does not exist" in text
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    assert "holds no run" in sentence([*options, "--resume_from_checkpoint=true"], capsys)[1]


def test_a_command_marks_its_folder_before_jax_starts(tmp_path):
    """A job that is killed while it starts can be resumed: nothing heavy is imported before run.json is there."""
    code = (
        "import sys, os\n"
        "from jaxtrl import sft\n"
        "class Stop:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'jax':\n"
        "            os._exit(9)\n"  # as a kill would
        "sys.meta_path.insert(0, Stop())\n"
        f"sft.main(['--output_dir={tmp_path / 'out'}'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1])
    assert done.returncode == 9
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "no such file"),
        ("", "is empty"),
        ("\n\n", "no rows"),
        (CHAT + '{"messages": [}\n', "line 2: not valid JSON"),
        ('{"question": "Hi", "answer": "Hello!"}\n', "question"),
        (CHAT + '{"text": "x"}\n', "line 2"),
    ],
    ids=["wrong path", "empty file", "blank file", "broken line", "missing column", "other columns"],
)
def test_wrong_data(options, tmp_path, capsys, content, expected):
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_text(content)
    code, text = sentence([*options, f"--dataset_name={path}"], capsys)
    assert code == 1
    assert expected in text
    assert str(path) in text or "column" in text


def test_unknown_flag_names_the_nearest(options, capsys):
    code, text = sentence([*options, "--learning_rat=1"], capsys)
    assert code == 2
    assert "learning_rate" in text


def test_max_length_smaller_than_every_prompt(options, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "one two three four five six seven eight", "completion": " nine"}\n')
    code, text = sentence([*options, f"--dataset_name={path}", "--max_length=4"], capsys)
    assert code == 1
    assert "no trained token within max_length" in text
    assert "raise max_length" in text


def test_tokenizer_without_a_template(options, tmp_path, capsys):
    """A model folder whose tokenizer has no chat template, and conversations as data."""
    from transformers import AutoTokenizer

    from jaxtrl.model.hf import save_pretrained
    from jaxtrl.trainers.model_source import tiny_model

    model, _ = tiny_model(0)
    save_pretrained(model, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path())
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(CHAT)
    argv = [*options, f"--model_name_or_path={tmp_path / 'model'}", f"--dataset_name={tmp_path / 'rows.jsonl'}"]
    code, text = sentence(argv, capsys)
    assert code == 1
    assert "no chat template" in text
    assert "chat_template_path" in text


def test_model_without_a_tokenizer(options, tmp_path, capsys):
    from jaxtrl.model.hf import save_pretrained
    from jaxtrl.trainers.model_source import tiny_model

    save_pretrained(tiny_model(0)[0], tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(CHAT)
    argv = [*options, f"--model_name_or_path={tmp_path / 'model'}", f"--dataset_name={tmp_path / 'rows.jsonl'}"]
    code, text = sentence(argv, capsys)
    assert code == 1
    assert "has no tokenizer" in text


def test_missing_pieces_are_named(options, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text(CHAT)
    assert "--dataset_name is missing" in sentence([*options, f"--model_name_or_path={tmp_path}"], capsys)[1]
    argv = [*options, f"--dataset_name={tmp_path / 'rows.jsonl'}", "--eval_strategy=epoch"]
    assert "--eval_dataset_name is missing" in sentence(argv, capsys)[1]
    argv = [*options, f"--resume_from_checkpoint={tmp_path / 'checkpoint-7'}"]
    assert "checkpoint-7" in sentence(argv, capsys)[1]


def test_a_tracker_that_is_not_installed(options, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "pip install 'jaxtrl[wandb]'" in sentence([*options, "--report_to=wandb"], capsys)[1]


def run(argv, folder):
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # one device
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-m", "jaxtrl.sft", *argv], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_errors_have_no_traceback_and_nothing_else_on_stderr(tmp_path):
    done = run(["--dataset_name=nowhere.jsonl", "--compile_cache=off"], tmp_path)
    assert done.returncode == 1
    assert done.stderr == "python -m jaxtrl.sft: error: no such file: 'nowhere.jsonl'\n"
    assert done.stdout == ""


@pytest.mark.slow
def test_text_that_the_terminal_cannot_show_does_not_stop_the_run(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text(CHAT.replace("Hello!", "Grüße, 世界"), encoding="utf-8")
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = run(["--dataset_name=rows.jsonl", "--max_steps=1", "--compile_cache=off"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Gr??e" in done.stdout


def test_help_lists_every_option_once():
    done = run(["--help"], ".")
    assert done.returncode == 0
    for name in (field.name for field in dataclasses.fields(SFTConfig)):
        assert done.stdout.count(f"  --{name} ") == 1, name


def test_the_default_options_are_those_of_the_configuration_file():
    (from_file,) = parse([SFTConfig], ["--config", str(CONFIGS / "sft_tiny.yaml")])
    (from_command,) = parse([SFTConfig], sft.tiny_flags([]))
    assert from_file == from_command


def test_naming_a_model_or_a_configuration_leaves_the_defaults_to_the_user():
    assert sft.tiny_flags(["--model-name-or-path", "x"]) == []
    assert sft.tiny_flags(["--config=x.yaml"]) == []
    own_data = sft.tiny_flags(["--dataset_name", "x"])
    assert own_data
    assert not any(flag.startswith(("--eval_", "--assistant_")) for flag in own_data)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("sft_*.yaml")), ids=lambda path: path.name)
def test_configurations_are_valid(path):
    (args,) = parse([SFTConfig], ["--config", str(path)])
    assert args.output_dir == yaml.safe_load(path.read_text())["output_dir"]


@pytest.mark.slow
def test_interrupt_is_one_line_and_leaves_nothing_half_written(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    # A shell starts background jobs with SIGINT ignored, which children inherit.
    code = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "runpy.run_module('jaxtrl.sft', run_name='__main__', alter_sys=True)"
    argv = [sys.executable, "-c", code, "--compile_cache=cache", "--max_steps=5000", "--save_steps=5"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(argv, cwd=tmp_path, env=environment, **pipes)
    output, deadline = tmp_path / "sft_output", time.monotonic() + 120
    while not (output / "checkpoint-10").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert len(errors.splitlines()) == 1
    assert "interrupted" in errors
    assert all(re.fullmatch(r"checkpoint-\d+", path.name) for path in output.glob("checkpoint*"))


@pytest.mark.slow
def test_no_arguments_train_a_tiny_model_that_learns(tmp_path):
    done = run(["--compile_cache=cache", "--max_steps=120"], tmp_path)
    assert done.returncode == 0, done.stderr
    output = tmp_path / "sft_output"
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    evaluations = [record["eval_loss"] for record in records if "eval_loss" in record]
    assert losses[-1] < 0.5 * losses[0]
    assert evaluations[-1] < 2.2
    assert records[-1]["programs"] == 2
    assert "eval_loss" in done.stdout
    assert "«" in done.stdout
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {path.name for path in output.iterdir()}
