"""Flags and --config: names, values, precedence, one sentence for every mistake."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrl.trainers.arguments import make_parser, parse
from jaxtrl.trainers.sft_config import SFTConfig

CONFIGS = Path(__file__).parents[2] / "configs"


def config_of(*argv: str) -> SFTConfig:
    (config,) = parse([SFTConfig], argv, prog="jaxtrl")
    return config


def error_of(capsys, *argv: str) -> str:
    """The sentence on stderr; asserts that it is one line and the exit code is 2."""
    with pytest.raises(SystemExit) as caught:
        config_of(*argv)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jaxtrl: error: ")
    assert err.count("\n") == 1
    return err.removeprefix("jaxtrl: error: ").rstrip("\n")


@pytest.fixture
def yaml_file(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_no_arguments_give_the_defaults():
    assert config_of() == SFTConfig()


def test_argv_defaults_to_the_process_arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["prog", "--max_steps", "4"])
    assert parse([SFTConfig])[0].max_steps == 4


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--learning_rate", "1e-3"], "learning_rate", 1e-3),
        (["--learning-rate=1e-3"], "learning_rate", 1e-3),
        (["--max_steps", "-1"], "max_steps", -1),
        (["--max_length", "none"], "max_length", None),
        (["--warmup_steps", "0.1"], "warmup_steps", 0.1),
        (["--packing"], "packing", True),
        (["--packing", "--seed", "3"], "packing", True),
        (["--packing", "true"], "packing", True),
        (["--packing=False"], "packing", False),
        (["--packing", "--no_packing"], "packing", False),
        (["--no-gradient-checkpointing"], "gradient_checkpointing", False),
        (["--completion_only_loss"], "completion_only_loss", True),
        (["--completion_only_loss", "none"], "completion_only_loss", None),
        (["--no_completion_only_loss"], "completion_only_loss", False),
        (["--chat_template_kwargs", '{"enable_thinking": false}'], "chat_template_kwargs", {"enable_thinking": False}),
        (["--lr_scheduler_kwargs", '{"min_lr_rate": 0.1}'], "lr_scheduler_kwargs", {"min_lr_rate": 0.1}),
        (["--report_to", "wandb", "tensorboard"], "report_to", ["wandb", "tensorboard"]),
        (["--report_to", "none"], "report_to", []),
        (["--dataset_name", "a.jsonl"], "dataset_name", "a.jsonl"),
        (["--dataset_name", "a.jsonl", "b.jsonl"], "dataset_name", ["a.jsonl", "b.jsonl"]),
        (["--pad_to_multiple_of", "64"], "pad_to_multiple_of", 64),
        (["--resume_from_checkpoint"], "resume_from_checkpoint", True),
        (["--resume_from_checkpoint", "true"], "resume_from_checkpoint", True),
        (["--resume_from_checkpoint", "out/checkpoint-3"], "resume_from_checkpoint", "out/checkpoint-3"),
        (["--run_name", "a-b_c"], "run_name", "a-b_c"),
    ],
)
def test_flags(argv, name, value):
    assert getattr(config_of(*argv), name) == value


def test_file_sets_options_and_flags_win(yaml_file):
    path = yaml_file(
        "# a run\nlearning_rate: 2e-5\nmax_steps: 7\npacking: true\nmax_length: null\nreport_to: [wandb]\n"
        "chat_template_kwargs:\n  enable_thinking: false\ndataset_name: [a.jsonl]\n"
    )
    config = config_of("--config", path, "--max_steps", "9", "--no_packing")
    assert (config.learning_rate, config.max_steps, config.packing, config.max_length) == (2e-5, 9, False, None)
    assert (config.report_to, config.chat_template_kwargs) == (["wandb"], {"enable_thinking": False})
    assert config_of("--config", yaml_file("# nothing\n")) == SFTConfig()


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--learning_rat", "3"], "unknown flag 'learning_rat'; did you mean 'learning_rate'?"),
        (["--max-step=3"], "unknown flag 'max_step'; did you mean 'max_steps'?"),
        (["--no_pack"], "unknown flag 'pack'; did you mean 'packing'?"),
        (["--zzz"], "unknown flag 'zzz'"),
        (["data.jsonl"], "unexpected argument 'data.jsonl': every option needs its --name"),
        (["--learning_rate", "fast"], "--learning_rate: expected a number, got 'fast'"),
        (["--learning_rate"], "argument --learning_rate: expected one argument"),
        (["--packing", "maybe"], "--packing: expected true or false, got 'maybe'"),
        (["--loss_type", "nl"], "--loss_type: expected one of nll, dft, got 'nl'; did you mean 'nll'?"),
        (["--chat_template_kwargs", "{x"], "--chat_template_kwargs: expected a mapping (JSON text) or none, got '{x'"),
        (["--packing", "--max_length", "none"], "max_length: packing needs a row length, set it to a number of tokens"),
        (["--config", "absent.yaml"], "--config: cannot read absent.yaml: No such file or directory"),
        (["--config"], "argument --config: expected one argument"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(capsys, argv, sentence):
    assert error_of(capsys, *argv) == sentence


@pytest.mark.parametrize("argv", [["--fp16"], ["--fp16", "true"], ["--no-fp16"], ["--fp16=false"]])
def test_refused_flags_give_the_reason(capsys, argv):
    assert error_of(capsys, *argv) == f"not supported by jaxtrl: fp16 ({SFTConfig.REFUSED['fp16']})"


@pytest.mark.parametrize("name", sorted(SFTConfig.REFUSED))
def test_every_refused_name_is_explained_on_the_command_line_and_in_a_file(capsys, yaml_file, name):
    reason = f"not supported by jaxtrl: {name} ({SFTConfig.REFUSED[name]})"
    assert error_of(capsys, f"--{name}", "1") == reason
    path = yaml_file(f"seed: 1\n{name}: 1\n")
    assert error_of(capsys, "--config", path) == f"{path} line 2: {reason}"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("packing: true\nlearnin_rate: 1\n", "FILE line 2: unknown key 'learnin_rate'; did you mean 'learning_rate'?"),
        ("\nlearning_rate: [1]\n", "FILE line 2: learning_rate: expected a number, got [1]"),
        ("learning_rate: null\n", "FILE line 1: learning_rate: expected a number, got None"),
        ("seed: 1\nseed: 2\n", "FILE line 2: seed is set twice"),
        ("seed: [1\nlearning_rate: 2\n", "FILE line 2: not valid YAML: expected ',' or ']', but got ':'"),
        ("- seed\n", "--config: FILE must hold `option: value` lines"),
        ("just text\n", "--config: FILE must hold `option: value` lines"),
        (
            "seed: !!python/object/apply:os.getcwd []\n",
            "FILE line 1: not valid YAML: could not determine a constructor",
        ),
    ],
)
def test_a_mistake_in_the_file_names_file_line_and_key(capsys, yaml_file, text, sentence):
    path = yaml_file(text)
    assert error_of(capsys, "--config", path).startswith(sentence.replace("FILE", path))


def test_a_binary_file_is_refused(capsys, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert error_of(capsys, "--config", str(path)) == f"--config: cannot read {path}: not a text file"


def test_help_is_complete_and_grouped(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit) as caught:
        config_of("--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for field in dataclasses.fields(SFTConfig):
        line = next(line for line in text.splitlines() if line.lstrip().startswith(f"--{field.name} "))
        assert field.metadata["help"] in text
        assert line
        assert f"\n{field.metadata['group']}:\n" in text
    assert "(default: 2e-05)" in text
    assert "(default: true)" in text
    assert text.count("(default: ") == len(dataclasses.fields(SFTConfig))


def test_defaults_in_help_are_the_defaults():
    for action in make_parser([SFTConfig])._actions:
        if action.dest in SFTConfig.__dataclass_fields__ and action.help != "==SUPPRESS==":
            default = SFTConfig.__dataclass_fields__[action.dest].default
            shown = {None: "none"}.get(default, default) if not isinstance(default, bool) else str(default).lower()
            assert action.help.endswith(f"(default: {shown})")


def test_several_classes_share_a_command_line():
    @dataclasses.dataclass
    class Extra:
        words: int = dataclasses.field(
            default=3, metadata={"help": "Words.", "group": "extra", "choices": None, "minimum": None}
        )

    config, extra = parse([SFTConfig, Extra], ["--words", "5", "--seed", "1"])
    assert (config.seed, extra.words) == (1, 5)


def test_parsing_starts_no_backend():
    """The environment of accelerators is set after parsing and before JAX starts."""
    code = "from jaxtrl.trainers.arguments import parse\nfrom jaxtrl.trainers.sft_config import SFTConfig\n"
    code += "print(parse([SFTConfig], ['--packing'])[0].packing)"
    environment = os.environ | {"JAX_PLATFORMS": "absent"}
    root = CONFIGS.parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, env=environment)
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("sft_*.yaml")), ids=lambda path: path.stem)
def test_the_configurations_of_the_repository_are_valid(path):
    assert config_of("--config", str(path)) != SFTConfig()


def test_there_are_configurations():
    assert {"sft_tiny", "sft_qwen3_0.6b"} <= {path.stem for path in CONFIGS.glob("*.yaml")}
