"""Documents of one row do not see each other: not a bit of one's logits depends on another."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.hf import params_from_hf
from jaxtrl.rows.batch import Sample, ShapeClass, concat_rows, make_batch
from jaxtrl.train.step import make_score_step
from tests.fixture_t import CONFIG, R1, R2, tensors


def test_changing_one_document_changes_no_log_prob_of_another_bitwise():
    config = Qwen3Config.from_dict(CONFIG)
    params = jax.tree.map(jnp.asarray, params_from_hf(config, tensors()))
    score = make_score_step(config)

    def log_probs(*documents):
        samples = [Sample(np.array(ids, np.int32), np.ones(len(ids), bool)) for ids in documents]
        return np.asarray(score(params, make_batch([concat_rows(samples)], ShapeClass(24, 24, 24, 3), 8))[0][0])

    other = [60, 2, 41, 41, 9, 33, 18, 5]
    before, after = log_probs(R2, R1, R2), log_probs(R2, R1, other)
    kept = len(R2) - 1 + len(R1) - 1
    np.testing.assert_array_equal(before[:kept], after[:kept])
    assert not np.array_equal(before[kept : kept + 7], after[kept : kept + 7])
    changed_first = log_probs(other, R1, R2)
    np.testing.assert_array_equal(before[7 : kept + 7], changed_first[7 : kept + 7])
