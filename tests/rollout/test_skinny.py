"""Products of few rows: exact to rounding for all row counts, sizes and dtypes, and what they keep of NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrl.rollout.skinny import COMPILER_OPTIONS, LONG, head_scores, product


@pytest.mark.parametrize("rows", [1, 2, 8, 11, 16, 17, 65])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_product_is_that_of_numpy(rows, dtype):
    rng = np.random.default_rng(rows)
    weight, x = (jnp.asarray(rng.normal(size=(n, 48)), dtype) for n in (100, rows))
    out = jax.jit(product, compiler_options=COMPILER_OPTIONS)(x, weight)
    assert out.dtype == jnp.float32
    right = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(out, right, atol=2e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_product_over_a_long_axis_is_that_of_numpy(dtype):
    rng = np.random.default_rng(0)
    weight, x = (jnp.asarray(rng.normal(size=(n, LONG)), dtype) for n in (36, 8))
    out = jax.jit(product, compiler_options=COMPILER_OPTIONS)(x, weight)
    np.testing.assert_allclose(out, np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T, atol=2e-4)


@pytest.mark.parametrize("group", [1, 2, 3])
def test_scores_are_those_of_numpy(group):
    rng = np.random.default_rng(group)
    q, keys = (rng.normal(size=(3, 2, n, 16)).astype(np.float32) for n in (group, 10))
    q[0, 1, 0, 3] = np.nan
    out = np.asarray(jax.jit(head_scores, compiler_options=COMPILER_OPTIONS)(q, keys))
    right = np.einsum("shgd,shcd->shgc", *(x.astype(np.float64) for x in (q, keys)))
    np.testing.assert_allclose(out, right, atol=2e-5)  # NaN where NaN
    assert np.isnan(out).sum() == 10


def test_what_is_not_finite_stays_so():
    x = np.ones((3, 16), np.float32)
    x[1, 2], x[2, 3] = np.nan, np.inf
    out = np.asarray(jax.jit(product, compiler_options=COMPILER_OPTIONS)(x, np.ones((32, 16), np.float32)))
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1]).all()
    assert not np.isfinite(out[2]).any()
