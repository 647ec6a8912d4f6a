"""Lines and batches: what is in a step, in which order, and that one class holds all packed batches."""

import itertools

import numpy as np
import pytest
from datasets import Dataset, IterableDataset

from jaxtrl.rows.blocks import needed_blocks
from jaxtrl.rows.order import BatchSizes, DataPosition
from jaxtrl.trainers.data import Batches, Lines, Packing, StreamLines, make_sample, read_samples


def make_dataset(lengths, trained_from=1, seed=0):
    rng = np.random.default_rng(seed)
    ids = [rng.integers(5, 60, n).tolist() for n in lengths]
    masks = [[i >= trained_from for i in range(n)] for n in lengths]
    return Dataset.from_dict({"input_ids": ids, "loss_mask": masks})


LENGTHS = [5, 9, 3, 30, 12, 7, 2, 16, 11, 4, 6]


def test_samples_are_read_in_the_order_asked_for():
    dataset = make_dataset(LENGTHS)
    samples = read_samples(dataset.with_format("arrow"), [3, 0, 3])
    assert [s.input_ids.tolist() for s in samples] == [dataset[i]["input_ids"] for i in (3, 0, 3)]
    assert [s.loss_mask.tolist() for s in samples] == [dataset[i]["loss_mask"] for i in (3, 0, 3)]
    assert samples[0].input_ids.dtype == np.int32
    assert read_samples(dataset.with_format("arrow"), []) == []


def test_a_selection_is_read_through_its_indices():
    dataset = make_dataset(LENGTHS).select([4, 2, 9])
    lines = Lines(dataset)
    assert lines.count == 3
    assert [line[0].input_ids.tolist() for line in lines.load([0, 1, 2])] == dataset["input_ids"][:]


def all_steps(batches, sizes, start=DataPosition(), seed=1, shuffle=True):
    while True:
        for micros, start in batches.epoch_steps(sizes, start, seed, shuffle):  # noqa: B020 - goes on where it ended
            yield micros, start


def rows_of_steps(batches, sizes, steps, start=DataPosition(), shuffle=True):
    """Token rows (without padding) of each micro-batch and device, and the positions, of the next steps."""
    taken = list(itertools.islice(all_steps(batches, sizes, start, shuffle=shuffle), steps))
    return [[micro.batch.input_ids.tobytes() for micro in micros] for micros, _ in taken], [p for _, p in taken]


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("packing", [None, Packing("bfd", 32), Packing("bfd_split", 16), Packing("wrapped", 24)])
def test_any_position_continues_with_the_same_batches(packing, window):
    batches = Batches(Lines(make_dataset(LENGTHS), packing), per_device=1, block=8, window=window)
    sizes = BatchSizes(per_device=1, devices=2, accumulation=2)
    batches_of_run, positions = rows_of_steps(batches, sizes, 9)
    assert any(p.offset == 0 for p in positions)
    for step, position in enumerate(positions):
        assert rows_of_steps(batches, sizes, 8 - step, position)[0] == batches_of_run[step + 1 :]


def test_an_epoch_has_each_sequence_once_and_counts_add_up():
    dataset = make_dataset(LENGTHS)
    batches = Batches(Lines(dataset), per_device=2, block=8)
    seen, tokens = [], 0
    for micros, position in all_steps(batches, BatchSizes(2, 2, 1), seed=3):
        for micro in micros:
            tokens += micro.tokens
            assert micro.padded == micro.batch.input_ids.size
            assert micro.slots == int((micro.batch.weight > 0).sum()) == int(micro.batch.denominator.sum())
            for ids, positions in zip(micro.batch.input_ids, micro.batch.position_ids, strict=True):
                text = ids[: np.flatnonzero(ids)[-1] + 1] if ids.any() else ids[:0]
                starts = np.flatnonzero(positions[: len(text)] == 0)
                seen += [part.tolist() for part in np.split(text, starts[1:])] if len(text) else []
        if position == DataPosition(1, 0):
            break
    assert sorted(seen) == sorted(dataset["input_ids"][:])
    assert tokens == sum(LENGTHS)


def test_pairs_are_the_visible_pairs_of_tokens():
    micro = Batches(Lines(make_dataset([3, 4])), per_device=2, block=8).build([[0, 1]])
    assert micro.pairs == 3 * 4 // 2 + 4 * 5 // 2


@pytest.mark.parametrize("length", [32, 20])  # a multiple of the attention block, and not
@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
@pytest.mark.parametrize("trained_from", [1, 6])
def test_packed_batches_have_one_class_in_any_order(length, strategy, trained_from):
    lengths = np.random.default_rng(0).integers(1, 45, 60).tolist()
    lines = Lines(make_dataset(lengths, trained_from), Packing(strategy, length))
    batches = Batches(lines, per_device=3, block=8)
    shapes, trained = set(), []
    for micros, position in all_steps(batches, BatchSizes(3, 1, 1)):
        shapes |= {micro.shape for micro in micros}
        trained += [micro.slots for micro in micros]
        if position.epoch == 6:
            break
    assert len(shapes) == 1
    shape = shapes.pop()
    assert shape.tokens == -(-3 * length // 8) * 8
    assert shape.lanes <= (18 if length == 32 else 27)
    if strategy == "bfd":
        assert max(trained) <= shape.slots <= max(trained) + 24


def test_rows_of_whole_blocks_start_at_the_edge_of_a_block_and_padding_is_not_counted():
    lines = Lines(make_dataset([30, 31, 29]), Packing("bfd", 32))
    micro = Batches(lines, per_device=3, block=8).build([[0, 1, 2]])
    positions = micro.batch.position_ids[0]
    assert all(positions[edge] == 0 for edge in (0, 32, 64))
    assert micro.tokens == 90
    assert micro.slots == 87 == int(micro.batch.denominator.sum())


def test_the_document_that_fills_a_packed_row_has_its_lanes():
    lines = Lines(make_dataset([8] * 9), Packing("bfd", 32))  # two full rows without lanes, one with 24 tokens to fill
    batches = Batches(lines, per_device=2, block=8)
    assert [micro.shape.lanes for micro in (batches.build([[0, 1]]), batches.build([[2, 1]]))] == [3, 3]


def test_fixed_and_multiple_settings_hold_for_packed_rows_too():
    lines = Lines(make_dataset(LENGTHS), Packing("bfd", 32))
    assert Batches(lines, 2, "fixed:128", 8).build([[0, 1]]).shape.tokens == 128
    assert Batches(lines, 2, 16, 8).build([[0, 1]]).shape.tokens == 64


def test_the_fingerprint_sees_lengths_and_masks():
    prints = {
        Lines(make_dataset(LENGTHS)).fingerprint,
        Lines(make_dataset(LENGTHS[::-1])).fingerprint,
        Lines(make_dataset(LENGTHS, trained_from=3)).fingerprint,
    }
    assert len(prints) == 3
    assert Lines(make_dataset(LENGTHS, seed=5)).fingerprint in prints


def make_stream(lengths):
    rows = make_dataset(lengths)

    def generate():
        yield from rows

    return IterableDataset.from_generator(generate)


@pytest.mark.parametrize("packing", [None, Packing("bfd", 32)])
def test_a_stream_gives_its_order_every_epoch_and_can_be_taken_up_anywhere(packing):
    batches = Batches(StreamLines(make_stream(LENGTHS), packing), per_device=2, block=8)
    sizes = BatchSizes(2, 1, 1)
    run, positions = rows_of_steps(batches, sizes, 8)
    for step in (0, 2, 4, 5):
        assert rows_of_steps(batches, sizes, 7 - step, positions[step])[0] == run[step + 1 :]
    if packing is None:
        same = Batches(Lines(make_dataset(LENGTHS)), per_device=2, block=8)
        assert rows_of_steps(same, sizes, 8, shuffle=False)[0] == run


def test_make_sample_has_the_types_of_rows():
    sample = make_sample([1, 2], [False, True])
    assert sample.input_ids.dtype == np.int32
    assert sample.loss_mask.dtype == np.bool_


def padded_account(batches, sizes, steps, start=DataPosition(), seed=1, shuffle=True):
    """(what was foreseen of the steps from `start`, the micro-batches that came), after fitting the set to it."""
    run = batches.foresee(sizes, steps, seed, shuffle, start)
    batches.fit(run)
    taken = list(itertools.islice(all_steps(batches, sizes, start, seed, shuffle), steps))
    assert run.step.tolist() == [number for number, (micros, _) in enumerate(taken) for _ in micros]
    return run, [micro for micros, _ in taken for micro in micros]


@pytest.mark.parametrize("packing", [None, Packing("bfd", 32), Packing("bfd_split", 16), Packing("wrapped", 20)])
@pytest.mark.parametrize("setting", ["auto", "none", 16, "optimal:2", "fixed:192"])
@pytest.mark.parametrize(("trained_from", "window"), [(1, 1), (6, 3)])
def test_what_is_foreseen_comes(packing, setting, trained_from, window):
    batches = Batches(Lines(make_dataset(LENGTHS, trained_from), packing), 2, setting, block=8, window=window)
    sizes = BatchSizes(per_device=2, devices=2, accumulation=2)
    run, micros = padded_account(batches, sizes, 7, DataPosition(1, 8) if batches.lines.count > 8 else DataPosition(1))
    assert [batches.shapes.class_of(need) for need in run.needs.each()] == [micro.shape for micro in micros]
    assert run.tokens.tolist() == [micro.tokens for micro in micros]
    blocks = [sum(needed_blocks(row, 8) for row in micro.batch.visible_until) for micro in micros]
    padding = [sum(micro.shape.tokens // 8 for _ in range(2)) for micro in micros]
    assert all(0 <= b - f <= p for b, f, p in zip(blocks, run.blocks.tolist(), padding, strict=True))
    in_order = batches.foresee_in_order(2)
    assert [batches.shapes.class_of(need) for need in in_order.needs.each()] == [
        micro.shape for micro in batches.in_order(2)
    ]


def test_a_stream_cannot_be_foreseen():
    stream = StreamLines(make_stream(LENGTHS))
    with pytest.raises(ValueError, match="pad_to_multiple_of optimal:3 needs the lengths of all rows"):
        Batches(stream, 2, "optimal:3", 8)
    with pytest.raises(ValueError, match="max_programs needs the lengths of all rows"):
        Batches(stream, 2, "auto", 8, max_programs=3)
    with pytest.raises(ValueError, match="batch_window needs the lengths of all rows"):
        Batches(stream, 2, "auto", 8, window=3)


@pytest.mark.parametrize("setting", ["auto", 16, "optimal:2"])
def test_windows_use_each_line_once_an_epoch_and_pad_less(setting):
    lengths = np.random.default_rng(0).integers(2, 120, 90).tolist()
    padded = {}
    for window in (1, 5):
        batches, sizes = Batches(Lines(make_dataset(lengths)), 2, setting, 8, window=window), BatchSizes(2, 2, 3)
        run, micros = padded_account(batches, sizes, 2 * sizes.steps_per_epoch(90), seed=5)
        padded[window] = sum(micro.padded for micro in micros)
        assert run.tokens.sum() == 2 * sum(lengths)
        for epoch in (0, 1):
            order = batches._items(sizes, 5, True)(epoch, 0)
            assert sorted(order) == list(range(90))
    assert padded[5] < padded[1]


def test_rows_that_the_data_cannot_fill_are_not_padded_further():
    """Two lines of at most 20 tokens in batches of 4 lines: two rows, not four, and none longer than its data."""
    lines = Lines(make_dataset([20, 18]), Packing("bfd", 30))
    batches = Batches(lines, per_device=4, block=8)
    assert batches.shapes.classes[0].tokens == 40  # 30 is no multiple of the block: 20 each
    lines = Lines(make_dataset([20, 18]), Packing("bfd", 24))
    batches = Batches(lines, per_device=4, block=8)
    assert batches.shapes.classes[0].tokens == 48
    (micro,) = batches.in_order(1)
    assert (micro.tokens, micro.padded) == (38, 48)
