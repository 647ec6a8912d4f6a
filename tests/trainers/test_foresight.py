"""A run has the programs that were foreseen; results depend neither on the shape set nor on when it compiles."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from datasets import IterableDataset

from jaxtrl.trainers.callbacks import TrainerCallback
from tests.trainers.conftest import token_rows
from tests.trainers.test_resume import StopAt, assert_same_state, metrics, run_and_resume
from tests.trainers.test_sft_trainer import logged

# Batches of two fall on 128, 256, 384 and 512 tokens.
LENGTHS = (9, 150, 12, 270, 40, 100, 60, 180, 30, 200, 20)
UNPACKED = {"per_device_train_batch_size": 2, "pad_to_multiple_of": "auto", "max_length": None}


def shapes(trainer, kind):
    return [program.shape for program in trainer.programs.compiled if program.kind == kind]


def foreseen(trainer, kind):
    return [shape for known, shape in trainer.programs.foreseen if known == kind]


class CacheMisses:
    """Programs that XLA compiles from now on."""

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_listener(self._listen)

    def _listen(self, event, **_):
        self.count += event == "/jax/compilation_cache/cache_misses"


@pytest.fixture
def compile_count():
    misses = CacheMisses()
    yield misses
    jax.monitoring.unregister_event_listener(misses._listen)


def test_a_packed_run_compiles_the_step_once_and_evaluation_once(make_trainer, compile_count):
    """Short last batches, the last epoch and resuming add none; the second identical run compiles nothing at all."""
    options = {
        "packing": True,
        "max_length": 32,
        "pad_to_multiple_of": "auto",
        "num_train_epochs": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "trainer": {"train_dataset": token_rows((9, 5, 12, 30, 4, 10, 6, 8, 31, 17)), "eval_dataset": token_rows()},
    }
    whole, resumed, _, _ = run_and_resume(make_trainer, 3, **options)
    for trainer in (whole, resumed):
        assert [program.kind for program in trainer.programs.compiled] == ["train", "eval"]
        assert set(trainer.programs.foreseen) == {(p.kind, p.shape) for p in trainer.programs.compiled}
    assert_same_state(whole._train_state, resumed._train_state)
    for output_dir in ("second", "third"):  # the model of the second is made while the cache is on, as the third's
        jax.clear_caches()
        before = compile_count.count
        again = make_trainer(output_dir, **options)
        again.train()
        assert again.programs.from_cache == again.programs.count == 2
        assert_same_state(whole._train_state, again._train_state)
        assert logged(again, "programs_unforeseen")[-1] == 0
    assert compile_count.count == before


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_unpacked_run_has_the_programs_that_were_foreseen(make_trainer, accumulation, capsys):
    trainer = make_trainer(
        **UNPACKED,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=3,
        eval_strategy="epoch",
        trainer={"train_dataset": token_rows(LENGTHS), "eval_dataset": token_rows((20, 300, 25))},
        per_device_eval_batch_size=1,
    )
    trainer.train()
    ran = [(program.kind, program.shape) for program in trainer.programs.compiled]
    assert len(ran) == len(set(ran))
    assert set(ran) == set(trainer.programs.foreseen)
    step = "train" if accumulation == 1 else "accumulate"
    assert shapes(trainer, step) == foreseen(trainer, step)  # in the order in which they are needed
    assert len(shapes(trainer, step)) > 2
    assert len(shapes(trainer, "eval")) == 2
    text = capsys.readouterr().out
    assert f"{len(shapes(trainer, step))} {step}" in text.split("programs ")[1].splitlines()[0]
    batches, extent = trainer._batches["train"], trainer._extent
    run = batches.foresee(extent.sizes, extent.steps, 42, shuffle=True)
    padded = sum(batches.shapes.class_of(need).tokens for need in run.needs.each())
    assert f"{100 * (1 - run.tokens.sum() / padded):.1f} % padding" in text
    assert [line.split()[0] for line in text.split("program  ")[-1].splitlines()[1 : len(ran) + 1]] == [
        k for k, _ in ran
    ]
    records = [json.loads(line) for line in (Path(trainer.args.output_dir) / "metrics.jsonl").read_text().splitlines()]
    logged_programs = [record for record in records if "program" in record]
    assert [(record["program"], record.get("program_lanes")) for record in logged_programs] == [
        (kind, shape.lanes if shape else None) for kind, shape in ran
    ]
    for record in logged_programs:
        assert record["program_seconds"] > 0
        assert record["program_outputs_bytes"] > 0
        assert record["program_temporaries_bytes"] > 0 or record["program"] == "zeros"


@pytest.mark.slow
def test_results_do_not_depend_on_the_shape_set(make_trainer):
    """Issue 4: loss and gradient norm of the same parameters to 1e-5 relative in float32 (AdamW's first steps, which
    follow the sign of a gradient, would magnify rounding: the parameters stay)."""
    rows = token_rows(LENGTHS)
    runs = {}
    for setting in ("auto", 128, "optimal:2", "fixed:512", "none"):
        trainer = make_trainer(
            str(setting),
            **{**UNPACKED, "pad_to_multiple_of": setting},
            learning_rate=0.0,
            max_steps=4,
            trainer={"train_dataset": rows},
        )
        trainer.train()
        runs[setting] = trainer
    assert len(shapes(runs["optimal:2"], "train")) <= 2
    assert len(shapes(runs["fixed:512"], "train")) == 1
    for name in ("loss", "grad_norm"):
        for trainer in runs.values():
            assert logged(trainer, name) == pytest.approx(logged(runs["auto"], name), rel=1e-5)


def test_warm_up_changes_nothing_but_when_programs_are_compiled(make_trainer, tmp_path):
    rows = token_rows(LENGTHS)
    states, runs = [], []
    for warmup in ("none", "before", "background"):
        trainer = make_trainer(
            warmup,
            **UNPACKED,
            warmup=warmup,
            max_steps=5,
            compile_cache=str(tmp_path / "cache" / warmup),
            trainer={"train_dataset": rows},
        )
        trainer.train()
        states.append(trainer._train_state)
        runs.append(trainer)
    for trainer, state in zip(runs[1:], states[1:], strict=True):
        assert_same_state(states[0], state)
        assert metrics(trainer) == metrics(runs[0])
        assert set(trainer.programs.foreseen) == {(p.kind, p.shape) for p in trainer.programs.compiled}
        assert trainer.programs.from_cache == 0
    # Compiled ahead from abstract arguments or when called: the same programs.
    again = make_trainer(
        "again",
        **UNPACKED,
        max_steps=5,
        compile_cache=str(tmp_path / "cache" / "before"),
        trainer={"train_dataset": rows},
    )
    again.train()
    assert again.programs.from_cache == again.programs.count
    assert runs[1].programs.waited == 0 < runs[0].programs.waited == runs[0].programs.seconds


@pytest.mark.parametrize("warmup", ["none", "before"])
def test_a_resumed_run_with_another_cache_state_is_bitwise_the_same(make_trainer, tmp_path, warmup):
    options = {**UNPACKED, "max_steps": 6, "batch_window": 3, "max_programs": 2}
    data = {"train_dataset": token_rows(LENGTHS)}
    whole = make_trainer("whole", **options, trainer=data)
    whole.train()
    make_trainer("parts", **options, trainer={**data, "callbacks": [StopAt(2)]}).train()
    resumed = make_trainer("parts", **options, warmup=warmup, compile_cache=str(tmp_path / "empty"), trainer=data)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.programs.from_cache == 0
    assert_same_state(whole._train_state, resumed._train_state)
    assert metrics(whole) == metrics(resumed)
    assert len(shapes(whole, "train")) <= 2
    assert set(resumed.programs.foreseen) == {(p.kind, p.shape) for p in resumed.programs.compiled}


def test_a_longer_resumed_run_keeps_the_shapes_of_the_run(make_trainer):
    """The first 2 steps alone would have other classes than all 8."""
    options = {**UNPACKED, "pad_to_multiple_of": "optimal:2", "trainer": {"train_dataset": token_rows(LENGTHS)}}
    first = make_trainer(**options, max_steps=2, save_strategy="steps", save_steps=2)
    first.train()
    longer = make_trainer(**options, max_steps=8)
    longer.train(resume_from_checkpoint=True)
    assert longer._batches["train"].shapes == first._batches["train"].shapes
    assert set(longer.programs.foreseen) == {(p.kind, p.shape) for p in longer.programs.compiled}
    alone = make_trainer("alone", **options, max_steps=8)
    alone._begin(None)
    alone._end(is_complete=True)
    assert alone._batches["train"].shapes != first._batches["train"].shapes


def test_an_unforeseen_program_is_a_warning(make_trainer):
    """A callback that ends each epoch early brings rows into the run that were not to come."""

    class EndEpoch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_epoch_stop = True

    rows = token_rows((420, 20, 200, 12, 300, 9))
    trainer = make_trainer(
        per_device_train_batch_size=1,
        pad_to_multiple_of=128,
        max_length=None,
        max_steps=3,
        trainer={"train_dataset": rows, "callbacks": [EndEpoch]},
    )
    order = [trainer._batches["train"].lines.epoch(42, epoch) for epoch in range(3)]
    sizes = [-(-len(rows[i]["input_ids"]) // 128) * 128 for i in order[0][:3]]
    come = [-(-len(rows[epoch[0]]["input_ids"]) // 128) * 128 for epoch in order]
    assert not set(come) <= set(sizes)
    with pytest.warns(UserWarning, match="a train program is compiled that was not foreseen: tokens is"):
        trainer.train()
    assert logged(trainer, "programs_unforeseen")[-1] == len(set(come) - set(sizes))


def test_a_stream_says_that_it_cannot_be_foreseen(make_trainer, capsys):
    stream = IterableDataset.from_generator(lambda: iter(token_rows()))
    make_trainer(max_steps=2, trainer={"train_dataset": stream}).train()
    assert "unknown for a stream" in capsys.readouterr().out


def test_many_programs_are_said_with_a_hint(make_trainer, capsys):
    rows = token_rows(np.arange(20, 2000, 128).tolist())
    trainer = make_trainer(
        per_device_train_batch_size=1, pad_to_multiple_of=128, max_length=None, trainer={"train_dataset": rows}
    )
    trainer._begin(None)
    trainer._end(is_complete=True)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("programs"))
    assert "16 train; 9.9 % padding in training" in line
    assert "max_programs" in line


def test_high_effort_unrolls_the_layers_and_gives_the_same_loss(make_trainer):
    runs = [make_trainer(effort, max_steps=2, compile_effort=effort) for effort in ("low", "high")]
    for trainer in runs:
        trainer.train()
    assert [trainer.steps.unroll for trainer in runs] == [1, 2]
    assert logged(runs[0], "loss") == pytest.approx(logged(runs[1], "loss"), rel=1e-6)


def test_the_programs_of_packed_rows_are_foreseen_with_their_attention_blocks(make_trainer):
    """Long documents are packed into rows of larger blocks on some backends; what is warmed up is what then runs."""
    rows = token_rows([500, 510, 490, 505])
    options = {"packing": True, "max_length": 512, "pad_to_multiple_of": "auto", "per_device_train_batch_size": 1}
    trainer = make_trainer(trainer={"train_dataset": rows}, warmup="before", max_steps=2, **options)
    trainer.train()
    assert trainer._batches["train"].block in (128, 256)
    assert trainer.programs.metrics()["programs_unforeseen"] == 0
    assert trainer.programs.count == 1
