"""Documents of a row and branches of a tree do not see each other: not a bit of one depends on another."""

from functools import cache

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.hf import params_from_hf
from jaxtrl.rows.batch import TERM_COLUMNS, Row, Sample, ShapeClass, concat_rows, make_batch
from jaxtrl.rows.tree import tree_row
from jaxtrl.train.step import make_score_step
from tests.fixture_t import CONFIG, R1, R2, tensors
from tests.rows.test_tree import forests


@cache
def score_step():
    config = Qwen3Config.from_dict(CONFIG)
    return make_score_step(config), params_from_hf(config, tensors())


def score(row: Row) -> tuple[np.ndarray, np.ndarray]:
    """Log-prob and entropy of each term."""
    step, params = score_step()
    row = row._replace(**dict.fromkeys(TERM_COLUMNS))
    logp, entropy = step(params, make_batch([row], ShapeClass(104, 96, 96, 78), 8))
    return np.asarray(logp)[0, : len(row.term_slot)], np.asarray(entropy)[0, : len(row.term_slot)]


def test_changing_one_document_changes_no_log_prob_of_another_bitwise():
    def log_probs(*documents):
        return score(concat_rows([Sample(np.array(ids, np.int32), np.ones(len(ids), bool)) for ids in documents]))[0]

    other = [60, 2, 41, 41, 9, 33, 18, 5]
    before, after = log_probs(R2, R1, R2), log_probs(R2, R1, other)
    kept = len(R2) - 1 + len(R1) - 1
    np.testing.assert_array_equal(before[:kept], after[:kept])
    assert not np.array_equal(before[kept : kept + 7], after[kept : kept + 7])
    changed_first = log_probs(other, R1, R2)
    np.testing.assert_array_equal(before[7 : kept + 7], changed_first[7 : kept + 7])


@settings(max_examples=50)
@given(forests(), st.data())
def test_changing_one_branch_changes_no_log_prob_outside_of_it_bitwise(samples, data):
    """The tokens from any token of a tree down to its leaves are replaced, its siblings and its stem stay."""
    row = tree_row(samples)
    if not len(row.input_ids):
        return
    start = data.draw(st.integers(0, len(row.input_ids) - 1))
    end = int(row.visible_until[start])
    changed = row.input_ids.copy()
    changed[start:end] = (row.input_ids[start:end] * 7 + data.draw(st.integers(20, 40))) % 64
    at = row.slot_index[row.term_slot]
    inside = (start <= at) & (at < end)
    for before, after in zip(score(row), score(row._replace(input_ids=changed)), strict=True):
        np.testing.assert_array_equal(before[~inside], after[~inside])
        assert not inside.any() or not np.array_equal(before[inside], after[inside])
