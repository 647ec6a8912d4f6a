"""Losses against NumPy references; sums over the terms of a slot."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxtrl.train import losses
from jaxtrl.train.losses import dft, nll, sum_by_sample, sum_by_slot, supervised_loss, take_slots
from jaxtrl.train.mesh import make_mesh

LOGP = np.array([-0.1, -2.0, -7.5], np.float32)


def test_nll():
    np.testing.assert_allclose(nll(jnp.asarray(LOGP)), -LOGP)
    np.testing.assert_allclose(jax.grad(lambda x: nll(x).sum())(jnp.asarray(LOGP)), -np.ones(3))


def test_dft():
    np.testing.assert_allclose(dft(jnp.asarray(LOGP)), -np.exp(LOGP) * LOGP, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda x: dft(x).sum())(jnp.asarray(LOGP)), -np.exp(LOGP), rtol=1e-6)


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_slope_is_the_derivative(loss_type):
    loss, logp = supervised_loss(loss_type), jnp.asarray(LOGP)
    slope = np.ones(3) if loss.slope is None else loss.slope(logp)
    np.testing.assert_allclose(jax.grad(lambda x: loss.value(x).sum())(logp), -slope, rtol=1e-6)
    np.testing.assert_allclose(loss.value(logp), -slope * logp, rtol=1e-6)


def test_unknown_loss():
    with pytest.raises(ValueError, match="loss_type is 'nlll': use one of nll, dft"):
        supervised_loss("nlll")


@pytest.mark.parametrize(("slots", "terms"), [(1, 1), (5, 9), (300, 700), (512, 512)])
def test_sum_by_slot(slots, terms):
    rng = np.random.default_rng(0)
    columns, term_slot = (
        rng.standard_normal((terms, 2)).astype(np.float32),
        rng.integers(0, slots, terms).astype(np.int32),
    )
    want = np.zeros((slots, 2))
    np.add.at(want, term_slot, columns)
    got = jax.jit(sum_by_slot, static_argnums=2)(columns, term_slot, slots)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("terms", [1, 9, 700])
def test_sum_by_sample(terms):
    rng = np.random.default_rng(0)
    values, weight = rng.standard_normal((2, terms)).astype(np.float32)
    number = rng.integers(0, 5, terms).astype(np.int32) * 1000
    same = (number[:, None] == number).astype(np.float64)
    total = lambda v: (weight * sum_by_sample(v, jnp.asarray(number))).sum()  # noqa: E731
    np.testing.assert_allclose(jax.jit(sum_by_sample)(values, number), same @ values, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(jax.jit(jax.grad(total))(values), same @ weight, rtol=1e-5, atol=1e-5)


def test_take_slots():
    rng = np.random.default_rng(0)
    values, term_slot = rng.standard_normal(40).astype(np.float32), rng.integers(0, 40, 90).astype(np.int32)
    weight = rng.standard_normal(90).astype(np.float32)
    value, gradient = jax.jit(jax.value_and_grad(lambda v: (weight * take_slots(v, jnp.asarray(term_slot))).sum()))(
        values
    )
    want = np.zeros(40)
    np.add.at(want, term_slot, weight)
    np.testing.assert_allclose(value, (weight * values[term_slot]).sum(), rtol=1e-5)
    np.testing.assert_allclose(gradient, want, rtol=1e-5, atol=1e-6)


def test_take_slots_of_replicated_values_sums_over_devices():
    mesh, term_slot = make_mesh(2), np.array([[0, 1, 1], [1, 1, 2]], np.int32)

    def total(values, index):
        return jax.lax.psum(take_slots(values, index[0]).sum(), "data")

    def gradient(values, index):
        return jax.grad(total)(values, index)

    specs = (PartitionSpec(), PartitionSpec("data"))
    got = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=PartitionSpec()))(
        jnp.zeros(3), term_slot
    )
    np.testing.assert_array_equal(got, [1, 4, 1])


def test_chunks_bound_the_comparison():
    jaxpr = str(
        jax.make_jaxpr(lambda c, s: sum_by_slot(c, s, 4 * losses.CHUNK))(jnp.zeros((50, 1)), jnp.zeros(50, int))
    )
    assert f"[{losses.CHUNK},50]" in jaxpr
    assert f"[{4 * losses.CHUNK},50]" not in jaxpr
