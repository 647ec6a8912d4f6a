"""What rows need, from lengths alone, is what the built rows need."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtrl.rows.batch import Sample, ShapeClass, concat_rows, make_batch
from jaxtrl.rows.needs import Documents, Need, need_of

lines = st.lists(st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70)), max_size=4), min_size=1, max_size=8)


def sample(length: int, trained: int) -> Sample:
    return Sample(np.arange(length), np.arange(length) >= length - trained)


def as_documents(drawn) -> Documents:
    flat = [(n, min(max(n - 1, 0), t)) for line in drawn for n, t in line]
    lengths, trained = np.array(flat, np.int64).reshape(-1, 2).T
    return Documents(lengths, trained, np.cumsum([0, *map(len, drawn)]))


def build(drawn, rows):
    return [concat_rows([sample(n, min(max(n - 1, 0), t)) for i in row for n, t in drawn[i]]) for row in rows]


@given(lines, st.data(), st.sampled_from([8, 16]))
def test_needs_from_lengths_are_those_of_the_rows(drawn, data, block_size):
    choice = st.lists(st.integers(0, len(drawn) - 1), max_size=3)
    rows = data.draw(st.lists(choice, min_size=1, max_size=6))
    needs, built = as_documents(drawn).needs(rows, block_size), build(drawn, rows)
    assert needs.each() == [need_of([row], block_size) for row in built]
    (largest,) = needs.largest(len(rows)).each()
    assert largest == need_of(built, block_size)
    tokens = max(block_size, -(-largest.tokens // block_size) * block_size)
    shape = ShapeClass(tokens, *(max(1, size) for size in largest[1:4]))
    make_batch(built, shape, block_size)  # the exact class holds them
    if largest.lanes > 1:
        with pytest.raises(ValueError, match="attention lanes"):
            make_batch(built, shape._replace(lanes=largest.lanes - 1), block_size)


@given(lines)
def test_lines_filled_up_begin_at_the_edge_of_a_block(drawn):
    documents = as_documents(drawn)
    room = -(-max(1, *(sum(n for n, _ in line) for line in drawn)) // 16) * 16
    filled = documents.filled(room)
    each = filled.needs([[i] for i in range(len(drawn))], 16)
    assert each.tokens.tolist() == [room] * len(drawn)
    assert each.slots.tolist() == documents.needs([[i] for i in range(len(drawn))], 16).slots.tolist()
    (together,) = filled.needs([list(range(len(drawn)))], 16).each()
    assert together.lanes == each.lanes.sum()
    if room > 16:
        with pytest.raises(ValueError, match="is longer than"):
            documents.filled(room - 17)


def test_one_sequence_and_two_documents():
    documents = Documents(np.array([40, 24]), np.array([39, 3]), np.array([0, 1, 2]))
    assert documents.needs([[0], [0, 1], []], 16).each() == [
        Need(40, 39, 39, 3, 1),
        Need(64, 42, 42, 4, 2),  # three blocks of the first, two of the second
        Need(0, 0, 0, 0, 0),
    ]


def test_a_batch_without_rows_is_refused():
    with pytest.raises(ValueError, match="one row per device"):
        need_of([], 16)
