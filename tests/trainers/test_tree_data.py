"""Tree rows in the trainer: the loss of separate rows, one class for all batches, counts, resuming."""

import numpy as np
import pytest
from datasets import Dataset, IterableDataset

from jaxtrl.rows.order import BatchSizes
from jaxtrl.trainers.data import Batches, Packing
from jaxtrl.trainers.sft_config import SFTConfig
from jaxtrl.trainers.tree_data import TreeLines
from tests.trainers.test_data import all_steps, rows_of_steps
from tests.trainers.test_resume import assert_same_state


def turns(trajectories=4, turns=5, seed=0, longest=10):
    """Rows as agents make them: each turn is a row of its own that begins with all turns before it."""
    rng = np.random.default_rng(seed)
    rows, system = [], rng.integers(5, 64, 7).tolist()
    for _ in range(trajectories):
        ids = list(system)
        for _ in range(turns):
            ids = ids + rng.integers(5, 64, rng.integers(2, longest)).tolist()
            answer = rng.integers(5, 64, rng.integers(1, 6)).tolist()
            rows.append({"input_ids": ids + answer, "labels": [-100] * len(ids) + answer})
            ids = ids + (answer if rng.random() < 0.7 else [*answer[:-1], 4])  # sometimes rewritten
    return rows


def make_dataset(rows) -> Dataset:
    masks = [[label != -100 for label in row["labels"]] for row in rows]
    return Dataset.from_dict({"input_ids": [row["input_ids"] for row in rows], "loss_mask": masks})


def paths(batch, device) -> list[list[int]]:
    """The path to every token of a device's row."""
    ids, visible = batch.input_ids[device], batch.visible_until[device]
    return [ids[: i + 1][visible[: i + 1] > i].tolist() for i in range(len(ids))]


@pytest.mark.parametrize("setting", ["auto", "none", 16, "fixed:512", "optimal:2"])
@pytest.mark.parametrize("length", [96, 100])  # a multiple of the attention block, and not
def test_batches_hold_every_sample_and_need_what_is_foreseen(setting, length):
    rows = turns()
    lines = TreeLines(make_dataset(rows), Packing("tree", length, 8))
    batches = Batches(lines, per_device=2, setting=setting, block=8)
    sizes = BatchSizes(per_device=2, devices=2, accumulation=1)
    run = batches.foresee(sizes, 6, 1, True)
    batches.fit(run)
    seen, tokens, distinct, shapes = [], 0, 0, set()
    for micros, position in all_steps(batches, sizes):
        for micro in micros:
            shapes.add(micro.shape)
            tokens, distinct = tokens + micro.tokens, distinct + micro.distinct
            assert micro.padded >= micro.distinct
            for device in range(2):
                found = paths(micro.batch, device)
                terms = micro.batch.weight[device] > 0
                ends = micro.batch.slot_index[device][micro.batch.term_slot[device][terms]]
                targets = micro.batch.slot_target[device][micro.batch.term_slot[device][terms]]
                seen += [[*found[end], target] for end, target in zip(ends, targets.tolist(), strict=True)]
        if position.epoch == 1:
            break
    expected = [
        row["input_ids"][: i + 1] for row in rows for i, label in enumerate(row["labels"]) if label != -100 and i
    ]
    assert sorted(seen) == sorted(expected)
    assert tokens == sum(len(row["input_ids"]) for row in rows) == lines.raw_tokens
    assert distinct == lines.unique_tokens < 0.6 * tokens
    assert setting == "none" or len(shapes) <= 2
    assert setting != "auto" or len(shapes) == 1


def test_rows_hold_their_length_and_do_not_share_across_lines():
    lines = TreeLines(make_dataset(turns(trajectories=12)), Packing("tree", 96, 8))
    assert lines.count > 3
    assert (lines.documents.needs([[i] for i in range(lines.count)]).tokens <= 96).all()
    batches = Batches(lines, per_device=3, block=8)
    micro = batches.build([[0, 1, 2]])
    row = micro.batch
    assert all(row.position_ids[0][edge] == 0 for edge in (96, 192))
    assert (row.visible_until[0][:96] <= 96).all()
    assert (row.visible_until[0][96:192] <= 192).all()


def test_any_position_continues_with_the_same_batches():
    batches = Batches(TreeLines(make_dataset(turns(8)), Packing("tree", 96, 8)), per_device=1)
    sizes = BatchSizes(per_device=1, devices=2, accumulation=2)
    run, positions = rows_of_steps(batches, sizes, 7)
    for step, position in enumerate(positions):
        assert rows_of_steps(batches, sizes, 6 - step, position)[0] == run[step + 1 :]


def test_the_fingerprint_sees_which_samples_share():
    rows = turns()
    other = [{**row, "input_ids": [(i * 7 + n) % 60 for i in row["input_ids"]]} for n, row in enumerate(rows)]
    prints = [TreeLines(make_dataset(data), Packing("tree", 96, 8)).fingerprint for data in (rows, rows, other)]
    assert prints[0] == prints[1] != prints[2]


def losses(trainer):
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_loss_is_that_of_the_separate_rows(make_trainer, accumulation):
    rows = turns()
    common = {"num_train_epochs": 1, "max_length": 256, "learning_rate": 0.0, "pad_to_multiple_of": "auto"}
    separate = make_trainer("separate", {"train_dataset": rows}, per_device_train_batch_size=len(rows), **common)
    separate.train()
    options = {"packing": True, "packing_strategy": "tree", "gradient_accumulation_steps": accumulation, **common}
    tree = make_trainer("tree", {"train_dataset": rows}, per_device_train_batch_size=4 // accumulation, **options)
    tree.train()
    np.testing.assert_allclose(losses(tree), losses(separate), rtol=1e-5)
    entry = tree.state.log_history[0]
    raw = sum(len(row["input_ids"]) for row in rows)
    assert entry["num_tokens"] == raw
    assert entry["packing_ratio"] == pytest.approx(raw / tree._batches["train"].lines.unique_tokens)
    assert separate.state.log_history[0]["packing_ratio"] == 1


def test_evaluation_on_trees_is_that_of_the_rows(make_trainer):
    rows = turns()
    data = {"train_dataset": rows, "eval_dataset": rows}
    tree = make_trainer("tree", data, packing=True, packing_strategy="tree", pad_to_multiple_of="auto").evaluate()
    plain = make_trainer("plain", data, pad_to_multiple_of="auto").evaluate()
    for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy", "eval_num_tokens"):
        assert tree[name] == pytest.approx(plain[name], rel=1e-5)


def test_a_resumed_run_is_the_uninterrupted_one(make_trainer):
    options = {
        "packing": True,
        "packing_strategy": "tree",
        "max_length": 64,
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 3,
        "pad_to_multiple_of": "auto",
    }
    data = {"train_dataset": turns(6)}
    whole = make_trainer("whole", data, **options)
    whole.train()
    again = make_trainer("again", data, **options)
    again.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-3")
    assert_same_state(again.params, whole.params)


def test_introduction_says_what_is_shared(make_trainer, capsys):
    make_trainer(
        "out", {"train_dataset": turns()}, packing=True, packing_strategy="tree", max_steps=1, pad_to_multiple_of="auto"
    ).train()
    assert "packed into 1 tree rows: " in " ".join(capsys.readouterr().out.split())


def test_streams_are_refused(make_trainer):
    with pytest.raises(ValueError, match="packing_strategy: tree is planned over the whole data set"):
        SFTConfig(packing=True, packing_strategy="tree", dataset_streaming=True, max_steps=3)

    def generate():
        yield from turns()

    stream = IterableDataset.from_generator(generate)
    with pytest.raises(ValueError, match="packing_strategy tree is planned over the whole data set"):
        make_trainer(trainer={"train_dataset": stream}, packing=True, packing_strategy="tree", max_steps=2)
