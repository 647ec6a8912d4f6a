"""The plan agrees with what a run then logs; its keys are documented; wrong input is one sentence."""

import re

import pytest

from jaxtrl import plan
from jaxtrl.assets import tokenizer_path
from jaxtrl.planning.document import make_plan
from jaxtrl.planning.keys import KEYS
from jaxtrl.planning.make import prepare
from jaxtrl.planning.options import PlanConfig
from jaxtrl.train.mesh import make_mesh
from jaxtrl.trainers.sft_config import SFTConfig
from jaxtrl.trainers.sft_trainer import SFTTrainer
from tests.trainers.conftest import tiny_qwen3, token_rows

OPTIONS = PlanConfig(seconds_per_compile=2.0, matmul_tflops=0.1)
ROWS = token_rows([150, 40, 300, 90, 130, 20, 260, 70, 45, 200, 15], seed=1)
SHARED = [{"input_ids": [5, *range(6, 60), *range(6, 60), 5 + i, *range(10, 10 + 2 * i)]} for i in range(9)]


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_path())


@pytest.fixture
def one_device(monkeypatch):
    """The plan asks how many devices there are; the tests' trainers use one."""
    monkeypatch.setattr("jaxtrl.planning.make.mesh_of", lambda sizes: make_mesh(1))


def made(tmp_path, tokenizer, rows=ROWS, evaluation=None, options=OPTIONS, **flags):
    defaults = {"output_dir": str(tmp_path / "out"), "save_strategy": "no", "compile_cache": str(tmp_path / "cache")}
    args = SFTConfig(**{**defaults, "per_device_train_batch_size": 2, "max_length": 320, **flags})
    run = prepare(args, tiny_qwen3().config, tokenizer, rows, evaluation)
    return args, make_plan(run, options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        {"num_train_epochs": 2},
        {"packing": True, "num_train_epochs": 2, "pad_to_multiple_of": "none"},
        {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 1, "eval_strategy": "epoch"},
        {"packing": True, "packing_strategy": "tree", "eval_strategy": "epoch", "per_device_eval_batch_size": 3},
        {"max_steps": 4, "max_programs": 2, "batch_window": 2},
    ],
    ids=["unpacked", "packed, exact", "accumulated, evaluated", "tree, evaluated", "merged, windows"],
)
def test_a_run_has_the_programs_and_the_padding_of_its_plan(tmp_path, tokenizer, one_device, flags):
    is_tree = flags.get("packing_strategy") == "tree"
    rows, evaluation = (SHARED if is_tree else ROWS), (ROWS[:5] if "eval_strategy" in flags else None)
    args, planned = made(tmp_path, tokenizer, rows, evaluation, logging_steps=1, **flags)
    trainer = SFTTrainer(
        tiny_qwen3(), args, train_dataset=rows, eval_dataset=evaluation, processing_class=tokenizer, mesh=make_mesh(1)
    )
    seen = []
    step = trainer.steps.train
    trainer.steps.train = lambda state, micros: seen.extend(micros) or step(state, micros)
    trainer.train()
    kinds = {}
    for program in trainer.programs.compiled:
        kinds[program.kind] = kinds.get(program.kind, 0) + 1
    assert planned["run"]["programs"] == kinds
    assert trainer.programs.metrics()["programs_unforeseen"] == 0
    padding = 1 - sum(micro.distinct for micro in seen) / sum(micro.padded for micro in seen)
    assert planned["run"]["padding_share"] == pytest.approx(padding, abs=1e-9)
    assert planned["run"]["steps"] == trainer.state.global_step
    own = planned["shape_cost"]["settings"][0]
    assert own["is_this_run"]
    assert own["programs"]["all"] == sum(kinds.get(kind, 0) for kind in ("train", "accumulate", "zeros", "update"))
    assert own["padding_share"] == planned["run"]["padding_share"]
    assert [list(shape) for shape in dict.fromkeys(micro.shape for micro in seen)] == planned["run"]["classes"]


def documented(path):
    """The key of KEYS that stands for this path, or None."""
    return next((key for key in KEYS if re.fullmatch(_pattern(key), path)), None)


def _pattern(key):
    parts = [r"[^.]+" if part.isupper() else re.escape(part) for part in key.split(".")]
    return r"\.".join(parts)


def paths(value, prefix=""):
    if isinstance(value, dict) and value:
        for name, part in value.items():
            name = name.replace(".", "_")
            yield from paths(part, f"{prefix}.{name}" if prefix else name)
    elif isinstance(value, list):
        yield from ({p for part in value for p in paths(part, f"{prefix}[]")} or [f"{prefix}[]"])
    else:
        yield prefix


def test_every_key_is_documented_and_every_documented_key_exists(tmp_path, tokenizer, one_device, capsys):
    _, planned = made(tmp_path, tokenizer, evaluation=ROWS[:3], eval_strategy="epoch")
    found = {path.removesuffix("[][]") + "[]" if path.endswith("[][]") else path for path in paths(planned)}
    undocumented = {path for path in found if documented(path) is None and not path.startswith(FREE)}
    assert not undocumented
    assert {documented(path) for path in found} >= set(KEYS) - set(FREE)
    with pytest.raises(SystemExit):
        plan.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for key in KEYS:
        assert key in text


FREE = ("shape_cost.settings[].options", "shape_cost.recommended.options")  # names of SFTConfig


def test_the_accounts_are_kept_apart_and_time_is_counted(tmp_path, tokenizer, one_device):
    _, planned = made(tmp_path, tokenizer, num_train_epochs=20, per_device_train_batch_size=4)
    settings = {s["name"]: s for s in planned["shape_cost"]["settings"]}
    assert {name.partition(":")[0] for name in settings} == {
        "this run",
        "optimal",
        "128",
        "none",
        "fixed",
        "packing bfd",
    }
    exact, own = settings["none"], settings["this run: auto"]
    assert exact["programs"]["all"] > own["programs"]["all"]
    assert exact["padding_share"] < own["padding_share"]
    assert own["ahead_from_step"]["none"] is not None
    assert exact["ahead_from_step"]["this run: auto"] is None
    for s in settings.values():
        assert s["compile_minutes"]["all"] == pytest.approx(2.0 * s["programs"]["all"] / 60)
        assert s["minutes"]["all"] > s["compile_minutes"]["all"]
    best = planned["shape_cost"]["recommended"]
    assert settings[best["name"]]["minutes"]["all"] == min(s["minutes"]["all"] for s in settings.values())
    assert planned["sharing"]["raw_tokens"] == planned["data"]["tokens"]


def test_what_cannot_fit_is_refused_before_compiling(tmp_path, tokenizer, one_device, monkeypatch):
    _, planned = made(tmp_path, tokenizer, options=PlanConfig(device_memory_gib=1e-4, matmul_tflops=1.0))
    assert planned["memory"]["fits"] is False
    assert "lower per_device_train_batch_size" in planned["memory"]["refusal"]
    assert planned["shape_cost"]["recommended"]["name"] is None
    monkeypatch.setattr("jaxtrl.trainers.fitting.device_memory", lambda device, devices: 10**5)
    args = SFTConfig(output_dir=str(tmp_path / "run"), save_strategy="no", compile_cache="off")
    trainer = SFTTrainer(tiny_qwen3(), args, train_dataset=ROWS, processing_class=tokenizer, mesh=make_mesh(1))
    with pytest.raises(ValueError, match=r"needs about .* GiB of a device that has"):
        trainer.train()
    assert trainer.programs.count == 0
