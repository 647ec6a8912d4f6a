"""The tables name every pair of blocks that has a visible pair of tokens, once, and no other."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrl.rows.blocks import (
    CountedTables,
    block_tables,
    choose_block_size,
    count_lanes,
    needed_blocks,
    visited_blocks,
)
from tests.visibility import causal, forests, intervals, packed


def pairs_by_definition(visible_until: np.ndarray, size: int) -> set[tuple[int, int]]:
    """(query block, key block) of every pair of tokens that see each other."""
    i, j = np.indices((visible_until.size,) * 2)
    queries, keys = np.nonzero((j <= i) & (i < visible_until[None, :]))
    return set(zip((queries // size).tolist(), (keys // size).tolist(), strict=True))


def check(visible_until: np.ndarray, size: int, spare: int) -> None:
    pairs = pairs_by_definition(visible_until, size)
    blocks = visible_until.size // size
    lower = sorted((a, b) for a, b in pairs if a != b)
    tables = block_tables(visible_until, size, lanes=count_lanes(visible_until, size) + spare)
    live = int(tables.query_lanes.sum())
    listed = list(zip(tables.lane_query[:live].tolist(), tables.lane_key[:live].tolist(), strict=True))
    assert listed == lower
    assert tables.query_lanes.tolist() == [
        sum(a == block for a, _ in lower) for block in range(tables.query_lanes.size)
    ]
    assert all(field.dtype == np.int32 for field in tables)
    assert count_lanes(visible_until, size) == max(1, len(lower))
    assert needed_blocks(visible_until, size) == len(pairs)
    assert visited_blocks(tables) == max(1, len(lower)) + spare + blocks
    assert visited_blocks(CountedTables(*tables)) == len(pairs)


@settings(deadline=None)
@given(forests(max_blocks=6, size=4), st.sampled_from([1, 2, 4]), st.integers(0, 3))
def test_forest(visible_until, size, spare):
    check(visible_until, size, spare)


@settings(deadline=None)
@given(intervals(max_blocks=6, size=4), st.sampled_from([1, 2, 4]), st.integers(0, 3))
def test_any_intervals(visible_until, size, spare):
    check(visible_until, size, spare)


def test_packed_documents_of_the_bench_need_no_more_than_they_visit():
    """Issue 3's shapes: 4 and 16 documents of 512 tokens; visited over needed is 1."""
    for documents in (4, 16):
        row = packed([512] * documents)
        tables = block_tables(row)
        assert needed_blocks(row) == 10 * documents
        assert visited_blocks(tables) == needed_blocks(row)


def test_causal_row_lists_the_lower_triangle():
    tables = block_tables(causal(12), 4)
    assert tables.lane_query.tolist() == [1, 2, 2]
    assert tables.lane_key.tolist() == [0, 0, 1]
    assert tables.query_lanes.tolist() == [0, 1, 2]


def test_padding_row_needs_the_diagonal_only_and_has_no_empty_table():
    row = np.arange(16, dtype=np.int32) + 1
    tables = block_tables(row, 4)
    assert needed_blocks(row, 4) == 4
    assert count_lanes(row, 4) == tables.lane_query.size == 1
    assert tables.query_lanes.sum() == 0


def test_shapes_depend_on_the_class_alone():
    shapes = {tuple(field.shape for field in block_tables(row, 4, 20)) for row in (causal(16), packed([3, 5, 8]))}
    assert shapes == {((20,), (20,), (4,))}


def test_one_device_more_is_one_more_row_of_tables():
    tables = block_tables(packed([8, 8]), 4)
    both = type(tables)(*(np.stack([field, field]) for field in tables))
    assert visited_blocks(both) == 2 * visited_blocks(tables)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (causal(10), "10 entries: pad the row to a multiple of 4"),
        (np.zeros(0, np.int32), "0 entries"),
        (np.array([4, 1, 4, 4], np.int32), r"visible_until\[1\] is 1: it must lie in 2..4"),
        (np.array([4, 4, 4, 5], np.int32), r"visible_until\[3\] is 5: it must lie in 4..4"),
    ],
)
def test_invalid_rows_are_refused(row, message):
    for function in (count_lanes, block_tables, needed_blocks):
        with pytest.raises(ValueError, match=message):
            function(row, 4)


def test_too_few_lanes_are_refused():
    with pytest.raises(ValueError, match="needs 6 attention lanes but its shape class has 5"):
        block_tables(causal(16), 4, lanes=5)


@pytest.mark.parametrize(
    ("lengths", "row_length", "backend", "size"),
    [
        ([4000] * 3, 8192, "cpu", 256),
        ([100] * 50, 2048, "cpu", 128),  # most of a larger block would be seen by nothing
        ([4000] * 3, 8192 + 128, "cpu", 128),  # 256 does not divide the row
        ([4000] * 3, 8192, "neuron", 128),  # not measured
        ([], 8192, "cpu", 128),
    ],
)
def test_block_size_follows_the_documents(lengths, row_length, backend, size):
    assert choose_block_size(np.array(lengths, np.int64), row_length, backend) == size
