"""SFTTrainer: what it logs, saves and evaluates."""

import json
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from datasets import Dataset, IterableDataset

from jaxtrl.model.hf import load_params, load_pretrained
from jaxtrl.model.qwen3 import model_params
from jaxtrl.train.checkpoint import find_checkpoints
from jaxtrl.train.mesh import make_mesh
from jaxtrl.trainers.callbacks import TrainerCallback
from jaxtrl.trainers.meter import Clock
from tests.trainers.conftest import tiny_qwen3, token_rows
from tests.trainers.test_meter import FakeTime
from tests.trainers.test_resume import assert_same_state, flat, metrics, record_rows


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def test_it_learns_and_logs_trls_metrics(make_trainer):
    trainer = make_trainer(num_train_epochs=6, lr_scheduler_type="linear")
    output = trainer.train()
    losses = logged(trainer, "loss")
    assert len(losses) == 24 == output.global_step == trainer.state.global_step
    assert np.mean(losses[-4:]) < 0.8 * np.mean(losses[:4])
    assert output.training_loss == pytest.approx(np.mean(losses), rel=1e-12)
    names = "loss grad_norm learning_rate entropy mean_token_accuracy num_tokens epoch step tokens_per_second"
    names += (
        " padding_share packing_ratio programs programs_from_cache programs_unforeseen compile_seconds skipped_steps"
    )
    assert set(names.split()) == set(trainer.state.log_history[0])
    assert logged(trainer, "num_tokens")[:-1] == np.cumsum(token_counts(trainer)).tolist()
    assert logged(trainer, "epoch")[:5] == [0.25, 0.5, 0.75, 1.0, 1.25]
    assert logged(trainer, "learning_rate") == pytest.approx([1e-2 * (1 - i / 24) for i in range(24)], rel=1e-5)
    path = Path(trainer.args.output_dir) / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record for record in records if "program" not in record] == [
        {k: entry[k] for k in ("step", *(k for k in entry if k != "step"))} for entry in trainer.state.log_history
    ]


def token_counts(trainer):
    """Tokens of each step, from the order of the data."""
    lengths = (9, 5, 12, 7, 4, 10, 6, 8)
    lines = trainer._batches["train"].lines
    order = [n for epoch in range(6) for n in lines.epoch(42, epoch)]
    return [lengths[order[i]] + lengths[order[i + 1]] for i in range(0, 48, 2)]


def test_the_final_model_and_every_checkpoint_load_as_models(make_trainer, tmp_path):
    trainer = make_trainer(max_steps=3, save_strategy="steps", save_steps=2)
    trainer.train()
    for folder in (trainer.args.output_dir, find_checkpoints(trainer.args.output_dir)[-1]):
        assert_same_state(model_params(load_pretrained(folder)), trainer.params)
    assert_same_state(model_params(trainer.model), trainer.params)
    names = {path.name for path in Path(trainer.args.output_dir).iterdir()}
    assert {"checkpoint-2", "checkpoint-3", "config.json", "model.safetensors", "tokenizer.json", "run.json"} <= names
    from transformers import TrainerState

    state = TrainerState.load_from_json(str(Path(trainer.args.output_dir) / "checkpoint-2" / "trainer_state.json"))
    assert (state.global_step, state.epoch, len(state.log_history)) == (2, 0.5, 2)


def test_saved_dtype(make_trainer):
    trainer = make_trainer(max_steps=1, dtype="bfloat16")
    trainer.train()
    trainer.save_model()
    assert json.loads((Path(trainer.args.output_dir) / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_given_model_carries_the_trained_parameters_afterwards(make_trainer):
    model = tiny_qwen3()
    trainer = make_trainer(max_steps=2, trainer={"model": model})
    trainer.train()
    assert trainer.model is model
    assert_same_state(model_params(model), trainer.params)


def test_evaluation_is_a_token_mean_whatever_the_batches_are(make_trainer):
    rows = token_rows((9, 30, 3, 200, 17))
    results = [
        make_trainer(
            per_device_eval_batch_size=size, pad_to_multiple_of="fixed:384", trainer={"eval_dataset": rows}
        ).evaluate()
        for size in (1, 2, 5)
    ]
    assert {result["eval_num_tokens"] for result in results} == {259}
    for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"):
        assert [result[name] for result in results] == pytest.approx([results[0][name]] * 3, rel=1e-5)


def test_compute_metrics_sees_each_trained_token_once(make_trainer):
    rows = [{"input_ids": row["input_ids"], "labels": [-100, *row["input_ids"][1:]]} for row in token_rows((4, 7, 5))]
    seen = []

    def compute(prediction):
        seen.append(prediction)
        logp, entropy, hit = prediction.predictions
        assert logp.shape == entropy.shape == hit.shape == prediction.label_ids.shape
        return {"nll": -float(logp.mean()), "eval_hits": float(hit.mean())}

    result = make_trainer(
        per_device_eval_batch_size=2, trainer={"eval_dataset": rows, "compute_metrics": compute}
    ).evaluate()
    assert seen[0].label_ids.tolist() == [token for row in rows for token in row["input_ids"][1:]]
    assert result["eval_nll"] == pytest.approx(result["eval_loss"], rel=1e-5)
    assert result["eval_hits"] == pytest.approx(result["eval_mean_token_accuracy"], rel=1e-5)


def test_speed_leaves_out_evaluations(make_trainer):
    """Each step takes 2 seconds and each evaluation 1,000, on a clock that is told so; also the one before step 1."""
    time = FakeTime()

    class TwoSeconds(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            time.now += 2

    def slow(prediction):
        time.now += 1000
        return {}

    trainer = make_trainer(
        per_device_train_batch_size=1,
        train_sampling_strategy="sequential",
        max_steps=4,
        eval_on_start=True,
        eval_strategy="steps",
        eval_steps=1,
        trainer={"eval_dataset": token_rows((5,)), "compute_metrics": slow, "callbacks": [TwoSeconds]},
    )
    trainer.clock = Clock(time)
    trainer.programs._on_compile = None  # real seconds, which this clock does not know
    trainer.train()
    speeds = [record["tokens_per_second"] for record in trainer.state.log_history if "tokens_per_second" in record]
    assert speeds == [9 / 2, 5 / 2, 12 / 2, 7 / 2]


def test_several_evaluation_sets(make_trainer):
    sets = {"a": token_rows((5, 6)), "b": token_rows((7,))}
    result = make_trainer(trainer={"eval_dataset": sets}).evaluate()
    assert result["eval_a_num_tokens"] == 11
    assert result["eval_b_num_tokens"] == 7
    assert {"eval_a_loss", "eval_b_loss"} <= set(result)


class Scripted(TrainerCallback):
    """Replaces eval_loss, so that the best evaluation is known."""

    def __init__(self, losses):
        self.losses = list(losses)

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        metrics["eval_loss"] = self.losses.pop(0)


def test_the_best_checkpoint_is_kept_and_loaded(make_trainer):
    options = dict.fromkeys(("eval_strategy", "save_strategy"), "steps") | dict.fromkeys(
        ("eval_steps", "save_steps"), 1
    )
    trainer = make_trainer(
        max_steps=5,
        save_total_limit=1,
        load_best_model_at_end=True,
        trainer={"eval_dataset": token_rows((5, 6)), "callbacks": [Scripted([3.0, 1.0, 2.0, 2.5, 4.0])]},
        **options,
    )
    trainer.train()
    assert [path.name for path in find_checkpoints(trainer.args.output_dir)] == ["checkpoint-2", "checkpoint-5"]
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (1.0, 2)
    best = load_pretrained(Path(trainer.args.output_dir) / "checkpoint-2")
    assert_same_state(model_params(best), trainer.params)
    assert_same_state(model_params(load_pretrained(trainer.args.output_dir)), trainer.params)


def test_an_unsaved_best_evaluation_does_not_replace_the_saved_one(make_trainer):
    trainer = make_trainer(
        max_steps=6,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=1,
        load_best_model_at_end=True,
        trainer={"eval_dataset": token_rows((5, 6)), "callbacks": [Scripted([3.0, 2.0, 1.0, 2.5, 2.6, 2.7])]},
    )
    trainer.train()
    assert trainer.state.best_global_step == 3
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    assert [path.name for path in find_checkpoints(trainer.args.output_dir)] == ["checkpoint-2", "checkpoint-6"]


def test_save_strategy_best_saves_only_what_is_better(make_trainer):
    trainer = make_trainer(
        max_steps=4,
        save_strategy="best",
        eval_strategy="steps",
        eval_steps=1,
        trainer={"eval_dataset": token_rows((5, 6)), "callbacks": [Scripted([3.0, 1.0, 2.0, 0.5])]},
    )
    trainer.train()
    assert [path.name for path in find_checkpoints(trainer.args.output_dir)] == [f"checkpoint-{n}" for n in (1, 2, 4)]


def test_early_stopping_of_transformers_works(make_trainer):
    options = dict.fromkeys(("eval_strategy", "save_strategy"), "steps") | dict.fromkeys(
        ("eval_steps", "save_steps"), 1
    )
    from transformers import EarlyStoppingCallback

    callbacks = [Scripted([3.0, 1.0, 2.0, 2.5, 4.0, 5.0]), EarlyStoppingCallback(2)]
    trainer = make_trainer(
        load_best_model_at_end=True, trainer={"eval_dataset": token_rows((5, 6)), "callbacks": callbacks}, **options
    )
    trainer.train()
    assert trainer.state.global_step == 4


def test_a_callback_can_end_an_epoch(make_trainer):
    class EndEpoch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_epoch_stop = state.global_step == 1

    trainer = make_trainer(trainer={"callbacks": [EndEpoch]}, max_steps=5)
    rows = record_rows(trainer)
    trainer.train()
    order = [trainer._batches["train"].lines.epoch(42, epoch) for epoch in (0, 1)]
    assert flat(rows) == order[0][:2] + order[1]
    assert logged(trainer, "epoch")[:3] == [0.25, 1.25, 1.5]


def test_events_come_in_order_with_the_model(make_trainer):
    events = []

    class Record(TrainerCallback):
        pass

    def recorder(event):
        def call(self, args, state, control, **kwargs):
            assert kwargs["model"].config.vocab_size == 64
            events.append((event, state.global_step))

        return call

    for event in dir(TrainerCallback):
        if event.startswith("on_"):
            setattr(Record, event, recorder(event))
    trainer = make_trainer(
        max_steps=2,
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        trainer={"callbacks": [Record], "eval_dataset": token_rows((5,))},
    )
    trainer.train()
    assert events == [
        ("on_init_end", 0),
        ("on_train_begin", 0),
        ("on_epoch_begin", 0),
        ("on_step_begin", 0),
        ("on_step_end", 1),
        ("on_log", 1),
        ("on_step_begin", 1),
        ("on_step_end", 2),
        ("on_epoch_end", 2),
        ("on_log", 2),
        ("on_log", 2),
        ("on_evaluate", 2),
        ("on_save", 2),
        ("on_log", 2),
        ("on_train_end", 2),
    ]


def test_own_optimizer_and_schedule(make_trainer):
    optimizers = (optax.sgd(0.0), lambda step: 0.5 + step)
    trainer = make_trainer(max_steps=2, trainer={"optimizers": optimizers})
    before = model_params(tiny_qwen3())
    trainer.train()
    assert_same_state(before, trainer.params)
    assert logged(trainer, "learning_rate") == [0.5, 1.5]


def test_streams_equal_the_same_rows_in_order(make_trainer):
    rows = token_rows()

    def generate():
        yield from rows

    options = {"max_steps": 6, "pad_to_multiple_of": 128}
    stream = make_trainer("a", **options, trainer={"train_dataset": IterableDataset.from_generator(generate)})
    stream.train()
    data = make_trainer(
        "b", **options, train_sampling_strategy="sequential", trainer={"train_dataset": Dataset.from_list(rows)}
    )
    data.train()
    assert_same_state(stream.params, data.params)
    assert logged(stream, "loss") == logged(data, "loss")
    without_epoch = [[{k: v for k, v in m.items() if k != "epoch"} for m in metrics(t)] for t in (stream, data)]
    assert without_epoch[0] == without_epoch[1]


def test_a_stream_needs_max_steps(make_trainer):
    stream = IterableDataset.from_generator(lambda: iter(token_rows()))
    with pytest.raises(ValueError, match="max_steps"):
        make_trainer(trainer={"train_dataset": stream}).train()


def test_mfu_is_logged_where_the_peak_is_known(make_trainer, monkeypatch):
    monkeypatch.setattr("jaxtrl.trainers.steps.peak_flops", lambda device, dtype: 1e12)
    trainer = make_trainer(max_steps=2)
    trainer.train()
    for entry in trainer.state.log_history[:2]:
        assert 0 < entry["mfu"] < 1
        # Six FLOPs a token and parameter, and attention: within a factor of two of what the counted FLOPs give.
        assert entry["mfu"] * 1e12 / entry["tokens_per_second"] == pytest.approx(6 * 23_776, rel=0.5)


def test_two_devices_take_the_same_steps_as_one(make_trainer):
    one = make_trainer("one", per_device_train_batch_size=4)
    one.train()
    two = make_trainer("two", trainer={"mesh": make_mesh(2)})
    two.train()
    assert logged(two, "loss") == pytest.approx(logged(one, "loss"), rel=1e-5)
    assert logged(two, "num_tokens") == logged(one, "num_tokens")


@pytest.mark.slow
def test_a_cut_model_is_trained_saved_and_resumed_as_a_whole_one(make_trainer):
    """`mesh` as an option; evaluation, checkpoints and the final model too; a checkpoint goes on on another mesh."""
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    data = {"eval_dataset": token_rows((6, 9))}
    whole = make_trainer("whole", trainer={**data, "mesh": make_mesh(2)}, **options)
    whole.train()
    cut = make_trainer("cut", trainer={**data, "mesh": None}, mesh="data=1,fsdp=2,tensor=2", **options)
    assert {shard.data.shape for shard in cut.steps.place(cut.params)["embed_tokens"].addressable_shards} == {(32, 16)}
    cut.train()
    assert logged(cut, "loss") == pytest.approx(logged(whole, "loss"), rel=1e-5)
    assert logged(cut, "eval_loss") == pytest.approx(logged(whole, "eval_loss"), rel=1e-5)
    jax.tree.map(np.testing.assert_array_equal, load_params(cut.args.output_dir)[1], cut.params)
    again = make_trainer("cut", trainer={**data, "mesh": None}, mesh="data=2,tensor=2", **options)
    again.train(Path(cut.args.output_dir) / "checkpoint-2")
    assert logged(again, "loss") == pytest.approx(logged(whole, "loss"), rel=1e-5)
    assert again.programs.metrics()["programs_unforeseen"] == 0


def test_a_mesh_that_does_not_fit_the_model_is_refused(make_trainer):
    with pytest.raises(ValueError, match="mesh axis tensor is 4, but the model's num_key_value_heads is 2"):
        make_trainer(trainer={"mesh": None}, mesh="data=1,tensor=4")


def test_shuffle_dataset_changes_the_data_once(make_trainer):
    options = {"train_sampling_strategy": "sequential", "max_steps": 8}
    trainer = make_trainer(shuffle_dataset=True, **options)
    rows = record_rows(trainer)
    trainer.train()
    assert rows[:4] == rows[4:]
    assert sorted(flat(rows[:4])) == list(range(8)) != flat(rows[:4])


def test_interrupt_ends_cleanly(make_trainer):
    class Interrupt(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                raise KeyboardInterrupt

    trainer = make_trainer(save_strategy="steps", save_steps=2, trainer={"callbacks": [Interrupt]})
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert [path.name for path in find_checkpoints(trainer.args.output_dir)] == ["checkpoint-2"]
    left = [path.name for path in Path(trainer.args.output_dir).iterdir() if "tmp" in path.name]
    assert left == []


def test_missing_data_is_said(make_trainer):
    with pytest.raises(ValueError, match="train_dataset is missing"):
        make_trainer(trainer={"train_dataset": None}).train()
    with pytest.raises(ValueError, match="eval_dataset is missing"):
        make_trainer().evaluate()
    with pytest.raises(ValueError, match="eval_dataset is missing"):
        make_trainer(eval_strategy="steps", eval_steps=1)


def test_an_output_folder_that_cannot_be_made_is_said_at_once(make_trainer, tmp_path):
    (tmp_path / "file").write_text("")
    for folder in ("file", "file/sub"):
        with pytest.raises(ValueError, match=r"output_dir .*file.* cannot be made"):
            make_trainer(folder)


def test_ids_outside_the_embedding_are_refused_before_anything_is_compiled(make_trainer):
    with pytest.raises(ValueError, match=r"row 1 .*token id 64"):
        make_trainer(trainer={"train_dataset": [{"input_ids": [5, 6]}, {"input_ids": [5, 64]}]})


def test_introduction_and_example(make_trainer, capsys):
    rows = [{"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}, {"input_ids": [5, 6], "labels": [-100, -100]}]
    make_trainer(max_steps=1, trainer={"train_dataset": rows}).train()
    text = capsys.readouterr().out
    assert "parameters" in text
    assert "2 rows read, 1 dropped (1: no trained token), 0 truncated, 4 tokens, 2 trained" in text
    assert "«" in text
    assert "program train" in text
