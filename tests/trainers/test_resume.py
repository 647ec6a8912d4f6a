"""Resuming: bit for bit the uninterrupted run, wherever it was stopped; cases C15, C16 and C17."""

import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest
from datasets import IterableDataset

from jaxtrl.train.checkpoint import CheckpointError
from jaxtrl.trainers.callbacks import TrainerCallback
from jaxtrl.trainers.output_folder import begin_folder, check_resume, lock_folder, read_run_id
from tests.trainers.conftest import token_rows


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            control.should_training_stop = control.should_save = True
        return control


def record_rows(trainer):
    """The rows of each step from now on, as numbers (conftest.token_rows writes them into the first token)."""
    steps, train = [], trainer.steps.train

    def recording(state, micro_batches):
        rows = []
        for micro in micro_batches:
            ids, positions, weight = micro.batch.input_ids, micro.batch.position_ids, micro.batch.visible_until
            first = (positions == 0) & (weight > np.arange(ids.shape[1]) + 1)
            rows += (ids[first] - 5).tolist()
        steps.append(rows)
        return train(state, micro_batches)

    trainer.steps.train = recording
    return steps


def flat(steps):
    return [row for step in steps for row in step]


def metrics(trainer):
    path = Path(trainer.args.output_dir) / "metrics.jsonl"
    timed = ("tokens_per_second", "compile_seconds", "train_runtime", "train_steps_per_second", "programs")
    timed += ("eval_runtime", "eval_tokens_per_second", "programs_from_cache")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in record.items() if k not in timed} for record in records if "program" not in record]


def assert_same_state(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def run_and_resume(make_trainer, stop, **options):
    """(uninterrupted run, resumed run, rows of the resumed run's steps, rows of the whole run's steps)."""
    whole = make_trainer("whole", **options)
    all_rows = record_rows(whole)
    whole.train()
    options.setdefault("trainer", {})
    stopped = make_trainer("parts", **{**options, "trainer": {**options["trainer"], "callbacks": [StopAt(stop)]}})
    stopped.train()
    assert stopped.state.global_step == stop
    resumed = make_trainer("parts", **options)
    rows = record_rows(resumed)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.programs.from_cache == resumed.programs.count, "a resumed run has the programs of the whole one"
    return whole, resumed, rows, all_rows


def test_c15_resume_at_an_epoch_boundary_trains_the_second_epoch(make_trainer):
    whole, resumed, rows, all_rows = run_and_resume(make_trainer, stop=4, lr_scheduler_type="cosine", warmup_steps=2)
    assert len(rows) == 4
    assert resumed.state.global_step == 8
    assert rows == all_rows[4:]
    assert_same_state(whole._train_state, resumed._train_state)
    assert metrics(whole) == metrics(resumed)


def test_c16_resume_inside_a_later_epoch_keeps_its_order(make_trainer):
    whole, resumed, rows, all_rows = run_and_resume(make_trainer, stop=6)
    assert rows == all_rows[6:]
    assert sorted(flat(all_rows[4:])) == list(range(8))
    assert all_rows[:4] != all_rows[4:], "each epoch has an order of its own"
    assert_same_state(whole._train_state, resumed._train_state)
    assert metrics(whole) == metrics(resumed)


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_logs_between_checkpoints_accumulate_across_the_resume(make_trainer, stop):
    """A checkpoint lies between two logs, and an optimizer step is several micro-batches."""
    options = {
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 1,
        "logging_steps": 4,
        "pad_to_multiple_of": "fixed:384",
        "trainer": {"train_dataset": token_rows((150, 9, 140, 30, 8, 260, 12)), "eval_dataset": token_rows((9, 20))},
        "eval_strategy": "steps",
        "eval_steps": 3,
    }
    whole, resumed, rows, all_rows = run_and_resume(make_trainer, stop, **options)
    assert rows == all_rows[stop:]
    assert [len(step) for step in all_rows] == [2, 2, 2, 1] * 2
    assert_same_state(whole._train_state, resumed._train_state)
    assert metrics(whole) == metrics(resumed)
    assert whole.state.log_history[-1]["num_tokens"] == 2 * (150 + 9 + 140 + 30 + 8 + 260 + 12)


@pytest.mark.slow
def test_micro_batches_of_different_shapes(make_trainer):
    rows = token_rows((150, 9, 140, 30))
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "pad_to_multiple_of": 128}
    whole, resumed, _, _ = run_and_resume(make_trainer, 1, **options, trainer={"train_dataset": rows})
    assert {program.shape.tokens for program in whole.programs.compiled if program.kind == "accumulate"} == {128, 256}
    assert_same_state(whole._train_state, resumed._train_state)
    assert metrics(whole) == metrics(resumed)


def test_resume_of_packed_rows_in_bfloat16(make_trainer):
    options = {"packing": True, "max_length": 16, "bf16": True, "per_device_train_batch_size": 1, "loss_type": "dft"}
    options["pad_to_multiple_of"] = "auto"
    whole, resumed, _, _ = run_and_resume(make_trainer, 3, **options)
    assert_same_state(whole._train_state, resumed._train_state)
    assert metrics(whole) == metrics(resumed)
    assert whole.programs.count == 1


@pytest.mark.parametrize("stop", [3, 5])
def test_resume_of_a_stream(make_trainer, stop):
    stream = IterableDataset.from_generator(lambda: iter(token_rows()))
    whole, resumed, rows, all_rows = run_and_resume(make_trainer, stop, max_steps=7, trainer={"train_dataset": stream})
    assert rows == all_rows[stop:]
    assert flat(all_rows) == [*range(8), *range(6)]
    assert_same_state(whole._train_state, resumed._train_state)
    assert metrics(whole) == metrics(resumed)


def test_true_starts_anew_where_a_run_was_killed_before_its_first_checkpoint(make_trainer, tmp_path, capsys):
    begin_folder(tmp_path / "out", None, {})  # what the command leaves first of all
    trainer = make_trainer(max_steps=2, resume_from_checkpoint=True)
    trainer.train()
    assert trainer.state.global_step == 2
    assert "no checkpoint of this run" in capsys.readouterr().out


def test_true_is_refused_where_there_is_no_run_and_auto_starts_one(make_trainer, tmp_path, capsys):
    with pytest.raises(ValueError, match=r"output_dir .*mistyped does not exist, so there is nothing to continue"):
        make_trainer("mistyped", resume_from_checkpoint=True)
    assert not (tmp_path / "mistyped").exists()
    with pytest.raises(ValueError, match=r"output_dir .*out holds no run of jaxtrl"):
        make_trainer().train(resume_from_checkpoint=True)
    first = make_trainer(max_steps=2, save_strategy="steps", save_steps=1)
    first.train(resume_from_checkpoint="auto")
    assert "no checkpoint of this run" in capsys.readouterr().out
    again = make_trainer(max_steps=3, resume_from_checkpoint="auto")
    rows = record_rows(again)
    again.train()
    assert len(rows) == 1


@pytest.mark.parametrize("trace", ["run.json", "metrics.jsonl", "checkpoint-3"])
def test_any_trace_of_a_run_is_one(tmp_path, trace):
    (tmp_path / "notes.txt").write_text("not ours")
    with pytest.raises(ValueError, match="holds no run"):
        check_resume(True, tmp_path)
    (tmp_path / trace).mkdir() if "." not in trace else (tmp_path / trace).write_text("")
    check_resume(True, tmp_path)


def test_a_new_command_does_not_disown_the_run_in_its_folder(tmp_path):
    """It may fail before it trains, and the checkpoints of the earlier run are still there."""
    begin_folder(tmp_path / "out", None, {})
    first = read_run_id(tmp_path / "out")
    begin_folder(tmp_path / "out", None, {})
    assert read_run_id(tmp_path / "out") == first is not None


def test_two_runs_never_write_into_one_folder(make_trainer, tmp_path):
    (tmp_path / "out").mkdir()
    lock = lock_folder(tmp_path / "out")
    with pytest.raises(ValueError, match=r"output_dir .*out is in use by a run"):
        make_trainer(max_steps=1).train()
    os.close(lock)
    make_trainer(max_steps=1).train()
    os.close(lock_folder(tmp_path / "out"))


def test_run_file_on_a_full_disk_names_the_folder(tmp_path):
    (tmp_path / "run.json.tmp").symlink_to("/dev/full")
    with pytest.raises(ValueError, match=r"output_dir .*: run.json.tmp cannot be written \(No space left on device\)"):
        begin_folder(tmp_path, None, {})


def test_resuming_a_finished_run_trains_nothing(make_trainer):
    first = make_trainer(max_steps=3, save_strategy="steps", save_steps=2)
    first.train()
    again = make_trainer(max_steps=3, save_strategy="steps", save_steps=2)
    rows = record_rows(again)
    again.train(resume_from_checkpoint=True)
    assert rows == []
    assert_same_state(first._train_state, again._train_state)
    assert metrics(first) == metrics(again)


def test_a_new_run_in_the_folder_is_not_continued_from_the_old_ones_checkpoints(make_trainer, capsys):
    old = make_trainer(max_steps=5, save_strategy="steps", save_steps=5)
    old.train()
    new = make_trainer(max_steps=4, save_strategy="steps", save_steps=2)
    new.train()
    assert "checkpoint-5 is of an earlier run" in capsys.readouterr().out
    assert read_run_id(Path(new.args.output_dir)) == new_run_id(new, 4) != new_run_id(new, 5)
    again = make_trainer(max_steps=6, save_strategy="steps", save_steps=2)
    rows = record_rows(again)
    again.train(resume_from_checkpoint=True)
    assert len(rows) == 2
    assert [line["step"] for line in metrics(again) if "loss" in line] == [1, 2, 3, 4, 5, 6]


def new_run_id(trainer, step):
    return json.loads((Path(trainer.args.output_dir) / f"checkpoint-{step}" / "run.json").read_text())["run_id"]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"per_device_train_batch_size": 4}, "per_device_train_batch_size is 2 in the checkpoint and 4 here"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps is 1 in the checkpoint and 2 here"),
        ({"pad_to_multiple_of": 64}, "pad_to_multiple_of is fixed:128 in the checkpoint and 64 here"),
        ({"max_programs": 3}, "max_programs is None in the checkpoint and 3 here"),
        ({"batch_window": 2}, "batch_window is 1 in the checkpoint and 2 here"),
        ({"bf16": True}, "the compute dtype is float32 in the checkpoint and bfloat16 here"),
        ({"data_seed": 7}, "the order's seed is 42 in the checkpoint and 7 here"),
        ({"trainer": {"train_dataset": token_rows((5, 6, 7))}}, "the number of rows is 8 in the checkpoint and 3 here"),
        ({"trainer": {"train_dataset": token_rows((9, 5, 12, 7, 4, 10, 6, 9))}}, "the data .checksum"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_c17_another_run_is_refused(make_trainer, changed, expected):
    make_trainer(max_steps=1, save_strategy="steps", save_steps=1).train()
    with pytest.raises(CheckpointError, match=expected):
        make_trainer(max_steps=2, **changed).train(resume_from_checkpoint=True)


def test_c17_another_optimizer_is_refused(make_trainer):
    import optax

    make_trainer(max_steps=1, save_strategy="steps", save_steps=1).train()
    other = make_trainer(max_steps=2, trainer={"optimizers": (optax.sgd(1e-2, momentum=0.9), None)})
    with pytest.raises(CheckpointError, match=r"opt_state/.* absent"):
        other.train(resume_from_checkpoint=True)


def test_a_path_that_is_no_checkpoint_is_refused(make_trainer, tmp_path):
    with pytest.raises(CheckpointError, match=r"There is no checkpoint at .*nowhere"):
        make_trainer().train(resume_from_checkpoint=str(tmp_path / "nowhere"))
