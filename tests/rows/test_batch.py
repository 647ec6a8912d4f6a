"""Samples to rows to batches: cases C01, C03, C10, C11 (rows side), padding, columns, refusals."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtrl.rows.batch import Row, RowBatch, Sample, ShapeClass, concat_rows, make_batch, pad_visible
from jaxtrl.rows.blocks import block_tables, count_lanes


def sample(ids: list[int], trained: list[int] | None = None, **columns) -> Sample:
    """A sample whose tokens at the indices `trained` (default: all) are trained."""
    mask = np.ones(len(ids), bool) if trained is None else np.isin(np.arange(len(ids)), trained)
    return Sample(np.array(ids, np.int64), mask, **columns)


def pairs(row: Row) -> list[tuple[int, int]]:
    """(index whose hidden state predicts, token that is predicted) of each term."""
    return [(int(row.slot_index[s]), int(row.slot_target[s])) for s in row.term_slot]


def see(row: Row) -> np.ndarray:
    """see[i, j]: token i sees token j, by the definition of `visible_until`."""
    i, j = np.mgrid[: len(row.input_ids), : len(row.input_ids)]
    return (j <= i) & (i < row.visible_until[j])


def test_c01_a_trained_token_is_predicted_by_the_token_before_it():
    row = concat_rows([sample([5, 9, 12, 3], trained=[2, 3])])
    assert pairs(row) == [(1, 12), (2, 3)]
    assert row.denominator == 2


def test_c03_the_mask_says_what_is_trained_not_the_pad_id():
    rows = [sample([5, 9, 1]), sample([5, 9, 12, 3, 1])]
    row = concat_rows(rows)
    assert row.slot_target.tolist() == [9, 1, 9, 12, 3, 1]
    batch = make_batch([row], ShapeClass(16, 8, 8, 1), 8)
    assert int((batch.weight > 0).sum()) == 6
    seen_by_someone_else = (batch.visible_until[0] > np.arange(1, 17)).sum()
    assert seen_by_someone_else == 2 + 4  # the last token of each sequence is seen by itself only


def test_c10_packed_samples_are_isolated_and_positions_restart():
    row = concat_rows([sample([5, 9, 12, 3]), sample([7, 20, 31, 2])])
    assert row.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    np.testing.assert_array_equal(see(row), np.kron(np.eye(2), np.tril(np.ones((4, 4)))).astype(bool))


def test_c11_no_term_crosses_a_packed_boundary():
    row = concat_rows([sample([5, 9, 12, 3]), sample([7, 20, 31, 2])])
    assert pairs(row) == [(0, 9), (1, 12), (2, 3), (4, 20), (5, 31), (6, 2)]
    assert row.term_sample.tolist() == [0, 0, 0, 1, 1, 1]
    assert row.denominator == 6


def test_dtypes():
    row = concat_rows([sample([5, 9, 12])])
    for name, value in row._asdict().items():
        if isinstance(value, np.ndarray):
            assert value.dtype == (np.float32 if name == "weight" else np.int32), name


def test_an_empty_row_becomes_all_padding_with_denominator_zero():
    batch = make_batch([concat_rows([sample([5, 9, 12])]), concat_rows([])], ShapeClass(8, 4, 4, 1), 4)
    assert batch.denominator.tolist() == [2, 0]
    assert batch.weight.sum(axis=1).tolist() == [2, 0]
    assert batch.visible_until[1].tolist() == list(range(1, 9))
    assert not batch.input_ids[1].any()
    assert not batch.position_ids[1].any()


def test_empty_samples_and_samples_of_one_token_make_no_term():
    row = concat_rows([sample([]), sample([4]), sample([5, 6]), sample([])])
    assert row.input_ids.tolist() == [4, 5, 6]
    assert row.position_ids.tolist() == [0, 0, 1]
    assert pairs(row) == [(1, 6)]
    assert row.term_sample.tolist() == [2]


documents = st.lists(st.lists(st.tuples(st.integers(0, 63), st.booleans()), max_size=12), max_size=6)


@given(documents)
def test_a_row_is_its_samples_one_after_another(drawn):
    samples = [Sample(np.array([t for t, _ in d], int), np.array([m for _, m in d], bool)) for d in drawn]
    row = concat_rows(samples)
    start, terms = 0, []
    for number, s in enumerate(samples):
        n = len(s.input_ids)
        part = slice(start, start + n)
        assert row.input_ids[part].tolist() == s.input_ids.tolist()
        assert row.position_ids[part].tolist() == list(range(n))
        assert (row.visible_until[part] == start + n).all()
        terms += [(start + i - 1, int(s.input_ids[i]), number) for i in range(1, n) if s.loss_mask[i]]
        start += n
    assert [(*pair, int(owner)) for pair, owner in zip(pairs(row), row.term_sample, strict=True)] == terms
    assert len(row.input_ids) == start
    assert row.denominator == len(terms) == row.weight.sum()


@given(documents, st.sampled_from([4, 8]), st.integers(0, 3))
def test_a_batch_is_the_row_and_padding(drawn, block_size, extra):
    row = concat_rows([Sample(np.array([t for t, _ in d], int), np.array([m for _, m in d], bool)) for d in drawn])
    n, u = len(row.input_ids), len(row.slot_index)
    tokens = (n // block_size + 1) * block_size
    visible = pad_visible(row.visible_until, tokens)
    shape = ShapeClass(tokens, u + extra + 1, u + 2 * extra + 1, count_lanes(visible, block_size) + extra)
    batch = make_batch([row, concat_rows([])], shape, block_size)
    assert isinstance(batch, RowBatch)
    for name in ("input_ids", "position_ids", "slot_index", "slot_target", "term_slot", "term_sample", "weight"):
        value, got = getattr(row, name), getattr(batch, name)
        np.testing.assert_array_equal(got[0, : len(value)], value)
        assert not got[0, len(value) :].any(), name
        assert not got[1].any(), name
        assert got.dtype == value.dtype
    np.testing.assert_array_equal(batch.visible_until[0], visible)
    assert (visible[n:] == np.arange(n, tokens) + 1).all()
    for got, expected in zip(batch.tables, block_tables(visible, block_size, shape.lanes), strict=True):
        np.testing.assert_array_equal(got[0], expected)


def test_columns_follow_the_terms():
    logp = np.array([0, -1, -2, -3], np.float32)
    row = concat_rows(
        [
            sample([5, 9, 12, 3], trained=[2, 3], advantage=0.5, old_logp=logp),
            sample([7, 8], advantage=-1.0, old_logp=np.array([0, -9], np.float32)),
        ]
    )
    assert row.advantage is not None
    assert row.old_logp is not None
    assert row.advantage.tolist() == [0.5, 0.5, -1.0]
    assert row.old_logp.tolist() == [-2, -3, -9]
    assert row.ref_logp is None
    batch = make_batch([row, concat_rows([])], ShapeClass(8, 4, 5, 1), 8)
    assert batch.old_logp is not None
    assert batch.old_logp.tolist() == [[-2, -3, -9, 0, 0], [0, 0, 0, 0, 0]]
    assert batch.sampler_logp is None


def test_a_supervised_batch_has_no_columns():
    batch = make_batch([concat_rows([sample([5, 9])])], ShapeClass(4, 1, 1, 1), 4)
    assert (batch.advantage, batch.old_logp, batch.ref_logp, batch.sampler_logp) == (None, None, None, None)


def test_refusals_name_the_sample_and_the_field():
    with pytest.raises(ValueError, match=r"sample 1: loss_mask has 2 entries but input_ids has 3"):
        concat_rows([sample([5]), Sample(np.array([1, 2, 3]), np.ones(2, bool))])
    with pytest.raises(ValueError, match=r"sample 1 has no advantage but others"):
        concat_rows([sample([5, 6], advantage=1.0), sample([5, 6])])
    with pytest.raises(ValueError, match=r"row of device 1 has no advantage"):
        make_batch(
            [concat_rows([sample([5, 6], advantage=1.0)]), concat_rows([sample([5, 6])])], ShapeClass(4, 1, 1, 1), 4
        )


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (ShapeClass(4, 4, 4, 1), "has 5 tokens but its class holds 4"),
        (ShapeClass(8, 3, 4, 1), "has 4 slots but its class holds 3"),
        (ShapeClass(8, 4, 3, 1), "has 4 terms but its class holds 3"),
    ],
)
def test_a_row_that_does_not_fit_is_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        make_batch([concat_rows([sample([1, 2, 3, 4, 5])])], shape, 4)


def test_a_batch_needs_a_row_for_each_device():
    with pytest.raises(ValueError, match="one row per device"):
        make_batch([], ShapeClass(4, 1, 1, 1), 4)


def test_negative_ids_are_refused():
    row = concat_rows([Sample(np.array([5, -3, 2], np.int32), np.ones(3, bool))])
    with pytest.raises(ValueError, match="row of device 0 has the token id -3"):
        make_batch([row], ShapeClass(128, 16, 16, 1))
