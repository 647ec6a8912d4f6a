"""Epochs, steps and resume positions: cases C09 (data side), C12, C15, C16, and Hugging Face Trainer's arithmetic."""

import itertools
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtrl.rows.order import BatchSizes, DataPosition, epoch_order, micro_batches

sizes = st.builds(BatchSizes, st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))


def run(batch_sizes: BatchSizes, count: int, steps: int, start: DataPosition = DataPosition(), seed: int = 0):
    """[(micro-batches, position after)] of `steps` steps over shuffled epochs."""
    return list(islice(batch_sizes.steps(lambda e, offset: epoch_order(seed, e, count)[offset:], start), steps))


def rows_of(step) -> list[int]:
    return [int(i) for micro_batch in step[0] for device in micro_batch for i in device]


@given(st.integers(0, 300), st.integers(-(2**63), 2**63), st.integers(0, 2**32))
def test_an_epoch_uses_each_row_once(count, seed, epoch):
    assert sorted(epoch_order(seed, epoch, count).tolist()) == list(range(count))


def test_the_order_depends_on_seed_and_epoch_and_is_known():
    assert epoch_order(42, 0, 8).tolist() == epoch_order(42, 0, 8).tolist()
    orders = {tuple(epoch_order(seed, epoch, 50).tolist()) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16
    # Stored: a checkpoint made by one version of NumPy has to continue in another.
    assert epoch_order(42, 0, 8).tolist() == KNOWN_42_0
    assert epoch_order(42, 1, 8).tolist() == KNOWN_42_1
    assert epoch_order(42, 1, 8, shuffle=False).tolist() == list(range(8))


KNOWN_42_0 = [7, 1, 6, 4, 3, 5, 0, 2]
KNOWN_42_1 = [4, 5, 3, 0, 2, 7, 1, 6]


def test_every_place_is_equally_likely():
    counts = np.zeros((6, 6))
    for epoch in range(3000):
        counts[np.arange(6), epoch_order(7, epoch, 6)] += 1
    assert np.abs(counts / 500 - 1).max() < 0.2  # 4.5 standard deviations


@given(sizes, st.integers(1, 60), st.integers(0, 2**31))
def test_nothing_is_dropped_or_repeated(batch_sizes, count, seed):
    steps = run(batch_sizes, count, 2 * batch_sizes.steps_per_epoch(count), seed=seed)
    used = [row for step in steps for row in rows_of(step)]
    assert sorted(used[:count]) == list(range(count))
    assert sorted(used[count:]) == list(range(count))
    assert steps[-1][1] == DataPosition(2, 0)
    for number, (window, after) in enumerate(steps, start=1):
        assert after == batch_sizes.position(number, count)
        assert 1 <= len(window) <= batch_sizes.accumulation
        for micro_batch in window:
            assert len(micro_batch) == batch_sizes.devices
            lengths = [len(rows) for rows in micro_batch]
            assert lengths == sorted(lengths, reverse=True)  # only the last ones are short or empty
            assert max(lengths) <= batch_sizes.per_device
            assert lengths[0] > 0


@given(sizes, st.integers(1, 40), st.data())
def test_c16_a_resumed_run_sees_the_rows_of_the_uninterrupted_one(batch_sizes, count, data):
    total = 3 * batch_sizes.steps_per_epoch(count)
    stop = data.draw(st.integers(0, total - 1))
    whole = run(batch_sizes, count, total)
    position = whole[stop - 1][1] if stop else DataPosition()
    assert run(batch_sizes, count, total - stop, position) == whole[stop:]


def test_c15_resuming_at_an_epoch_boundary_starts_the_next_epoch():
    batch_sizes = BatchSizes(2)
    total = batch_sizes.total_steps(8, num_train_epochs=2)
    assert total == 8
    whole = run(batch_sizes, 8, total)
    assert whole[3][1] == DataPosition(1, 0)
    resumed = run(batch_sizes, 8, total - 4, whole[3][1])
    assert len(resumed) == 4
    assert resumed == whole[4:]
    assert sorted(row for step in resumed for row in rows_of(step)) == list(range(8))


def test_c12_steps_are_optimizer_updates():
    assert BatchSizes(1, 1, 4).total_steps(100, num_train_epochs=1) == 25


def test_c09_a_short_last_window_and_a_device_without_rows():
    batch_sizes = BatchSizes(per_device=2, devices=2, accumulation=4)
    window, after = next(batch_sizes.steps(lambda epoch, offset: range(6)))
    assert window == [[[0, 1], [2, 3]], [[4, 5], []]]
    assert after == DataPosition(1, 0)


def test_micro_batches_of_an_evaluation():
    assert list(micro_batches(range(7), 2, 2)) == [[[0, 1], [2, 3]], [[4, 5], [6]]]
    assert list(micro_batches([], 2)) == []


def test_a_stream_is_read_once_and_one_item_ahead():
    read = []

    def stream():
        for i in range(10):
            read.append(i)
            yield i

    steps = BatchSizes(1, 1, 3).steps(lambda epoch, offset: stream())
    assert next(steps) == ([[[0]], [[1]], [[2]]], DataPosition(0, 3))
    assert read == [0, 1, 2, 3]


@pytest.mark.torch
@pytest.mark.parametrize(("epochs", "max_steps"), [(1.0, -1), (3.0, -1), (0.3, -1), (2.5, -1), (3.0, 11)])
def test_step_counts_are_the_trainers(epochs, max_steps):
    pytest.importorskip("torch")
    from transformers import Trainer

    for count, accumulation in itertools.product([1, 7, 8, 16, 17, 100], [1, 3, 4]):
        args = SimpleNamespace(max_steps=max_steps, gradient_accumulation_steps=accumulation, num_train_epochs=epochs)
        trainer = SimpleNamespace(
            get_total_train_batch_size=lambda _: 0, get_sp_size=lambda: 1, num_examples=lambda loader: len(loader)
        )
        theirs = Trainer.set_initial_training_values(trainer, args, range(-(-count // 2)))
        batch_sizes = BatchSizes(2, 1, accumulation)
        assert batch_sizes.steps_per_epoch(count) == theirs[1]
        assert batch_sizes.total_steps(count, epochs, max_steps) == theirs[-1]


def test_refusals():
    with pytest.raises(ValueError, match="accumulation is 0"):
        BatchSizes(1, 1, 0)
    with pytest.raises(ValueError, match="has no rows left"):
        BatchSizes(1).total_steps(0)
    with pytest.raises(ValueError, match="streamed data set has no known length, so give max_steps"):
        BatchSizes(1).total_steps(None)
    with pytest.raises(ValueError, match="one must be positive"):
        BatchSizes(1).total_steps(3, num_train_epochs=0)
    with pytest.raises(ValueError, match="epoch 2 has no rows after row 5"):
        next(BatchSizes(1).steps(lambda epoch, offset: [], DataPosition(2, 5)))
