"""Training curves against TRL's SFTTrainer on one repeated batch: stored numbers, and live where TRL is installed.

Loss to 1e-3 and gradient norms to 1e-2 relative over 10 steps, float32, the same initial weights (see
golden/make_trl_golden.py).
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.hf import params_from_hf, save_pretrained
from jaxtrl.model.qwen3 import model_graphdef
from jaxtrl.rows.batch import RowBatch, Sample, concat_rows, make_batch
from jaxtrl.rows.ladder import ShapeSet
from jaxtrl.train.mesh import make_mesh
from jaxtrl.train.optimizer import make_optimizer, make_schedule
from jaxtrl.train.state import TrainState
from jaxtrl.train.step import make_eval_step, make_sft_step
from jaxtrl.trainers.sft_config import SFTConfig
from jaxtrl.trainers.sft_trainer import SFTTrainer
from tests.golden.formula_qwen3 import make_config, tensors
from tests.golden.make_trl_golden import COMMON, RUNS, STEPS, masked, placeholder_tokenizer

FOLDER = Path(__file__).parent / "golden"
GOLDEN = json.loads((FOLDER / "trl_sft.json").read_text(encoding="utf-8"))
SMALL = make_config(vocab_size=GOLDEN["vocab_size"])


def make_batches(rows: list[list[int]], prompt: bool) -> list[RowBatch]:
    """One micro-batch with all rows; labels as in the golden runs."""
    row = concat_rows([Sample(np.array(row, np.int32), np.array(masked(row, prompt)) >= 0) for row in rows])
    return [make_batch([row], ShapeSet.from_setting("auto").classify([row]))]


def schedule_settings(options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `make_schedule` for TRL's options."""
    args = SFTConfig(**(COMMON | options))
    names = {"schedule": args.lr_scheduler_type, "warmup_steps": args.get_warmup_steps(STEPS)}
    return {"learning_rate": args.learning_rate, "total_steps": STEPS, **names, **(args.lr_scheduler_kwargs or {})}


def run_steps(fields: dict[str, Any], batches: list[RowBatch], options: dict[str, Any]) -> dict[str, Any]:
    """The curves of `run_trl`, from the step functions."""
    config = Qwen3Config.from_dict(fields)
    args = SFTConfig(**(COMMON | options))
    optimizer = make_optimizer(
        **schedule_settings(options),
        weight_decay=args.weight_decay,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        max_grad_norm=args.max_grad_norm,
    )
    step = make_sft_step(config, optimizer, loss_type=args.loss_type, remat="matmuls")
    state = TrainState.create(jax.tree.map(jnp.asarray, params_from_hf(config, tensors(fields))), optimizer)
    logs = []
    for _ in range(STEPS):
        state, metrics = step(state, *batches)
        logs.append({name: float(value) for name, value in metrics.items()})
    assert int(state.step) == STEPS
    evaluate = make_eval_step(config, loss_type=args.loss_type)
    sums = [evaluate(state.params, batch) for batch in batches]
    total = {name: sum(float(part[name]) for part in sums) for name in sums[0]}
    return {name: [log[name] for log in logs] for name in logs[0]} | {
        "eval_loss": total["loss_sum"] / total["denominator"],
        "eval_entropy": total["entropy_sum"] / total["num_terms"],
        "eval_mean_token_accuracy": total["hit_sum"] / total["num_terms"],
    }


def assert_same_curves(ours: dict[str, Any], golden: dict[str, Any], token_means: bool = True) -> None:
    """`token_means`: whether TRL's entropy and accuracy are means over tokens (over micro-batches they are not)."""
    assert ours["skipped"] == [0.0] * STEPS
    np.testing.assert_allclose(ours["loss"], golden["loss"], rtol=0, atol=1e-3)
    np.testing.assert_allclose(ours["grad_norm"], golden["grad_norm"], rtol=1e-2)
    assert ours["eval_loss"] == pytest.approx(golden["eval_loss"], abs=1e-3)
    if token_means:
        np.testing.assert_allclose(ours["entropy"], golden["entropy"], rtol=0, atol=1e-3)
        one_token = 1.0 / ours["num_terms"][0]
        np.testing.assert_allclose(ours["mean_token_accuracy"], golden["mean_token_accuracy"], atol=1.01 * one_token)
        assert ours["eval_entropy"] == pytest.approx(golden["eval_entropy"], abs=1e-3)
        assert ours["eval_mean_token_accuracy"] == pytest.approx(
            golden["eval_mean_token_accuracy"], abs=1.01 * one_token
        )


@pytest.mark.parametrize("name", ["nll", "dft"])
def test_curves(name):
    options, prompt = RUNS[name]
    assert_same_curves(run_steps(SMALL, make_batches(GOLDEN["rows"], prompt), options), GOLDEN[name])


@pytest.mark.parametrize("name", RUNS)
def test_learning_rates(name):
    rate = make_schedule(**schedule_settings(RUNS[name][0]))
    np.testing.assert_allclose([rate(n) for n in range(STEPS)], GOLDEN[name]["learning_rate"], rtol=1e-6, atol=1e-12)


def test_the_runs_differ():
    """A parity test proves something only where the options change the numbers."""
    curves = [np.array(GOLDEN[name]["loss"]) for name in RUNS]
    for i, first in enumerate(curves):
        assert abs(first[-1] - first[0]) > 0.05
        for second in curves[i + 1 :]:
            assert np.abs(first - second).max() > 1e-2


def run_trainer(folder: Path, options: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    """The curves of `run_trl`, from `SFTTrainer` on one device."""
    args = SFTConfig(
        output_dir=str(folder / "out"),
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        per_device_eval_batch_size=4,
        compile_cache="off",
        **(COMMON | options),
    )
    trainer = SFTTrainer(args=args, mesh=make_mesh(1), **arguments)
    trainer.train()
    steps = [log for log in trainer.state.log_history if "loss" in log]
    assert len(steps) == STEPS
    names = ("loss", "grad_norm", "learning_rate", "entropy", "mean_token_accuracy", "num_tokens")
    evaluation = trainer.evaluate()
    return (
        {name: [log[name] for log in steps] for name in names}
        | {name: evaluation[name] for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy")}
        | {"skipped": [float(log["skipped_steps"]) for log in steps]}
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["recipe", "accumulated"])
def test_the_trainer_on_tokenised_rows(name, tmp_path):
    options, prompt = RUNS[name]
    config = Qwen3Config.from_dict(SMALL)
    params = jax.tree.map(jnp.asarray, params_from_hf(config, tensors(SMALL)))
    data = [{"input_ids": row, "labels": masked(row, prompt)} for row in GOLDEN["rows"]]
    ours = run_trainer(
        tmp_path,
        options,
        model=nnx.merge(model_graphdef(config), params),
        train_dataset=data,
        eval_dataset=data,
        processing_class=placeholder_tokenizer(),
    )
    ours["num_terms"] = [sum(label >= 0 for row in data for label in row["labels"][1:])]
    assert_same_curves(ours, GOLDEN[name], token_means=name != "accumulated")
    np.testing.assert_allclose(ours["learning_rate"], GOLDEN[name]["learning_rate"], rtol=1e-6, atol=1e-12)
    assert ours["num_tokens"] == GOLDEN[name]["num_tokens"]


@pytest.mark.slow
def test_the_trainer_on_chats(shared_data, tmp_path):
    """From chat_multiturn's messages and a checkpoint folder: template, EOS, truncation, Qwen3's whole vocabulary."""
    golden = json.loads((FOLDER / "trl_sft_qwen3_ids.json").read_text(encoding="utf-8"))["nll"]
    fields = make_config(vocab_size=151936, eos_token_id=151645, pad_token_id=151643)
    config = Qwen3Config.from_dict(fields)
    save_pretrained(
        (config, params_from_hf(config, tensors(fields))), tmp_path / "model", source=shared_data / "qwen3-tokenizer"
    )
    data = tmp_path / "chats.jsonl"
    with (shared_data / "jsonl" / "chat_multiturn.jsonl").open(encoding="utf-8") as lines:
        data.write_text("".join(next(lines) for _ in range(4)), encoding="utf-8")
    options = {"max_length": 256}
    ours = run_trainer(tmp_path, options, model=tmp_path / "model", train_dataset=str(data), eval_dataset=str(data))
    ours["num_terms"] = [golden["num_tokens"][0] - 4]
    assert_same_curves(ours, golden)
    assert ours["num_tokens"] == golden["num_tokens"]


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # what TRL and torch warn about is theirs
@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_live(loss_type):
    """TRL itself, on random ids, another shape with an untied head and biases, and a schedule with a floor."""
    pytest.importorskip("torch")
    pytest.importorskip("trl")
    from tests.golden.make_trl_golden import run_trl

    fields = make_config(vocab_size=96, hidden_size=24, num_attention_heads=6, num_hidden_layers=3, head_dim=8)
    fields |= {"tie_word_embeddings": False, "attention_bias": True}
    rng = np.random.default_rng(7)
    rows = [rng.integers(2, 96, length).tolist() for length in (33, 17, 25, 9)]
    options = {
        "loss_type": loss_type,
        "weight_decay": 0.05,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.2},
        "warmup_steps": 0.2,
    }
    golden = run_trl(fields, rows, options, prompt=True)
    assert_same_curves(run_steps(fields, make_batches(rows, prompt=True), options), golden)
    rate = make_schedule(**schedule_settings(options))
    np.testing.assert_allclose([rate(n) for n in range(STEPS)], golden["learning_rate"], rtol=1e-5, atol=1e-12)
