"""RoPE tables against float64 and the rotation against its definition."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrl.model.rope import rope_tables, rotate


def test_tables_are_cos_and_sin_of_position_times_frequency_in_float32():
    positions = np.array([0, 1, 2, 40959, 7], np.int32)
    cos, sin = rope_tables(jnp.asarray(positions), 16, 1e6)
    assert cos.dtype == sin.dtype == jnp.float32
    angle = positions[:, None] * 1e6 ** (-np.arange(0, 16, 2) / 16)
    small = positions < 100
    np.testing.assert_allclose(np.asarray(cos)[small], np.cos(angle)[small], atol=1e-6)
    np.testing.assert_allclose(np.asarray(sin)[small], np.sin(angle)[small], atol=1e-6)
    # at position 40959 a float32 angle is exact to 2e-3
    np.testing.assert_allclose(np.asarray(cos), np.cos(angle), atol=4e-3)


def test_rotation_turns_each_pair_and_scores_depend_on_distance_only():
    q, k = (np.random.default_rng(seed).normal(size=(1, 2, 8)).astype(np.float32) for seed in (0, 1))

    def score(i, j):
        a = rotate(jnp.asarray(q), *rope_tables(jnp.array([i]), 8, 100.0))
        b = rotate(jnp.asarray(k), *rope_tables(jnp.array([j]), 8, 100.0))
        return np.asarray((a * b).sum(-1))

    np.testing.assert_allclose(score(9, 4), score(25, 20), rtol=1e-4, atol=1e-5)
    assert np.abs(score(9, 4) - score(9, 5)).max() > 1e-2
    turned = np.asarray(rotate(jnp.asarray(q), *rope_tables(jnp.array([3]), 8, 100.0)))[0, 0]
    angle = 3 * 100.0 ** (-np.arange(0, 8, 2) / 8)
    pair = (q[0, 0, :4] + 1j * q[0, 0, 4:]) * np.exp(1j * angle)
    np.testing.assert_allclose(turned, np.concatenate([pair.real, pair.imag]), atol=1e-5)


def test_rotation_keeps_the_dtype_it_is_given_with_float32_tables():
    x = jnp.ones((2, 1, 4), jnp.float32)
    out = jax.eval_shape(lambda: rotate(x, *rope_tables(jnp.arange(2), 4, 1e6)))
    assert (out.shape, out.dtype) == ((2, 1, 4), jnp.float32)
