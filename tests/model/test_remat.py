"""Keeping a value for the backward pass changes neither values nor gradients, and names are found by the policies."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrl.model.remat import REMAT_POLICIES, keep, keep_residual


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_kept_values_have_the_same_bits_and_gradient(dtype):
    x = jnp.asarray(np.array([1.5, -0.0, np.inf, -3e38, 1e-40, np.nan]), dtype)
    for f in (keep, keep_residual):
        kept = jax.jit(partial(f, name="projection"))(x)
        assert kept.dtype == dtype
        assert (np.asarray(kept).view(np.uint8) == np.asarray(x).view(np.uint8)).all()
    gradient = jax.grad(lambda x: (keep(x, "projection").astype(jnp.float32) ** 2).sum())(x[:2])
    np.testing.assert_allclose(gradient.astype(jnp.float32), [3, 0])


@pytest.mark.parametrize(("policy", "sines"), [("full", 2), ("matmuls", 1)])
@pytest.mark.parametrize("scanned", [False, True])
def test_what_is_named_is_not_computed_again(policy, sines, scanned):
    def layer(x):
        return jnp.exp(keep(jnp.sin(jnp.exp(x)), "projection"))

    wrapped = jax.checkpoint(layer, policy=REMAT_POLICIES[policy])

    def loss(x):
        if scanned:
            return jax.lax.scan(lambda x, _: (wrapped(x), None), x, length=1)[0].sum()
        return wrapped(x).sum()

    assert str(jax.make_jaxpr(jax.grad(loss))(jnp.ones(2))).count("= sin ") == sines


@pytest.mark.parametrize(("policy", "sines"), [("full", 2), ("matmuls", 1)])
def test_residuals_of_a_custom_vjp_are_found(policy, sines):
    @jax.custom_vjp
    def f(x):
        return jnp.sin(x)

    def forward(x):
        y = keep_residual(jnp.sin(x), "attention")
        return y, y

    f.defvjp(forward, lambda y, g: (g * y,))
    loss = jax.checkpoint(lambda x: (f(x) * 2.0).sum(), policy=REMAT_POLICIES[policy])
    assert str(jax.make_jaxpr(jax.grad(loss))(jnp.ones(2))).count("= sin ") == sines
