"""The device side of generation: exact log-probs of given tokens, what does not fit, and Neuron lint."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrl.hardware.neuron import lint
from jaxtrl.model.qwen3 import model_params
from jaxtrl.rollout.decoding import BLOCK, Marks, SlotInputs
from jaxtrl.rollout.engine import Copy, Engine, prompt_row
from jaxtrl.rollout.sampling import Controls
from jaxtrl.rows.blocks import BlockTables
from tests.rollout.models import fixture_t

VOCAB = 64


@pytest.fixture(scope="module")
def engine() -> Engine:
    model = fixture_t()
    engine = Engine(model.config, model_params(model), 3, 1, jnp.float32, jnp.float32)
    engine.reserve(64)
    return engine


def only(engine: Engine, token: int, length: int, forced: int, temperature: float) -> SlotInputs:
    """Slot 1 goes on from `token`; nothing but `forced` may be drawn."""
    slots, values = np.full(3, 0, np.int32), np.ones(3, np.float32)
    stops = np.tile(np.arange(VOCAB) != forced, (3, 1))
    marks = Marks(np.zeros((3, VOCAB), bool), stops, slots + 1)
    controls = Controls(values * np.float32(temperature), slots, values, values * 0, values)
    place = np.arange(3) == 1
    return SlotInputs(
        np.where(place, token, 0).astype(np.int32),
        np.where(place, length, 0).astype(np.int32),
        np.full((engine.call, 3), 0.5, np.float32),
        controls,
        marks,
    )


@pytest.mark.parametrize(
    ("temperature", "right"),
    [(1.0, [-4.605965, -5.312547]), (0.5, [-6.060610, -6.959415])],
    ids=["C23", "C22b"],
)
def test_logps_of_given_tokens(engine, temperature, right):
    """Each token's log-prob comes from the logits before it, divided by the temperature."""
    row, starts = prompt_row([[30, 31, 32, 33], [5, 9]])
    engine.insert(engine.prefill(row), [Copy(starts[1], 2, 1)])
    first = engine.decode(only(engine, 12, 2, 3, temperature))
    second = engine.decode(only(engine, 3, 3, 7, temperature))
    assert (first.token[0, 1], second.token[0, 1]) == (3, 7)
    np.testing.assert_allclose([first.logp[0, 1], second.logp[0, 1]], right, atol=2e-6)
    np.testing.assert_allclose([first.sampled_logp[0, 1], second.sampled_logp[0, 1]], 0, atol=1e-6)


@pytest.mark.parametrize("donate", [True, False])
def test_donation_is_a_switch(donate):
    """Whether `insert` and `decode` may write the new cache over the old one."""
    model = fixture_t()
    engine = Engine(model.config, model_params(model), 3, 1, jnp.float32, jnp.float32, donate=donate)
    engine.reserve(64)
    row, starts = prompt_row([[30, 31]])
    before = engine._caches
    engine.insert(engine.prefill(row), [Copy(starts[0], 2, 1)])
    between = engine._caches
    engine.decode(only(engine, 12, 2, 3, 1.0))
    for old in (before, between):
        assert all(x.is_deleted() == donate for x in jax.tree.leaves(old))


def test_a_write_beyond_the_cache_is_refused_not_clamped(engine):
    inputs = only(engine, 12, engine.columns, 3, 1.0)
    with pytest.raises(ValueError, match="do not fit"):
        engine.decode(inputs)
    engine.decode(only(engine, 12, engine.columns - 1, 3, 1.0))


def test_columns_hold_the_longest_sequence_and_a_whole_call():
    model = fixture_t()
    for length in (1, 100, 120, 121, 128, 200, 1000, 1024):
        for call in (1, 8, 200):
            engine = Engine.__new__(Engine)  # no program is needed to count columns
            engine.config, engine.slots, engine.call, engine.columns = model.config, 1, call, 0
            engine.cache_dtype, engine.weights = np.dtype(np.float32), type("W", (), {"layers": ()})
            engine.reserve(length)
            assert engine.columns % BLOCK == 0
            assert engine.columns >= max(length, length - 2 + call)


def test_prompts_share_a_row_and_see_only_themselves():
    row, starts = prompt_row([[5, 9, 12], [7], [1, 2]])
    assert starts == [0, 3, 4]
    assert row.input_ids[:7].tolist() == [5, 9, 12, 7, 1, 2, 0]
    assert row.position_ids[:6].tolist() == [0, 1, 2, 0, 0, 1]
    assert row.visible_until[:8].tolist() == [3, 3, 3, 4, 6, 6, 7, 8]
    assert len(row.input_ids) == 128


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_no_program_has_what_neuron_cannot_run(dtype):
    model = fixture_t()
    engine = Engine(model.config, model_params(model), 2, 3, dtype, dtype, platform="neuron")
    engine.reserve(64)
    row, _ = prompt_row([[1] * 200])
    row = row._replace(tables=BlockTables(*row.tables))  # Neuron's tables have no counted loop
    assert lint(engine._prefill, engine.weights, row) == []
    prefilled = jax.eval_shape(engine._prefill, engine.weights, row)
    assert lint(engine._insert, engine._caches, prefilled, np.zeros((2, 3), np.int32)) == []
    for filtered in (False, True):
        assert lint(engine._decode, engine.weights, engine._caches, engine._empty_inputs(filtered)) == []
    assert lint(engine._make_weights, model_params(model)) == []
