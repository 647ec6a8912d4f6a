"""Head: values and gradients against a float64 NumPy reference and a plain log-softmax."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from jaxtrl.train import head
from jaxtrl.train.head import score
from jaxtrl.train.mesh import make_mesh


def data(slots, dim=8, vocab=50, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    hidden = (scale * rng.standard_normal((slots, dim))).astype(np.float32)
    weight = rng.standard_normal((vocab, dim)).astype(np.float32)
    return hidden, weight, rng.integers(0, vocab, slots).astype(np.int32), rng.standard_normal(slots).astype(np.float32)


def reference(hidden, weight, target, cotangent, temperature=1.0):
    """logp, entropy, hit and the gradients of sum(cotangent * logp), in float64."""
    hidden, weight, cotangent = (x.astype(np.float64) for x in (hidden, weight, cotangent))
    logits = hidden @ weight.T / temperature
    log_p = logits - np.logaddexp.reduce(logits, axis=1)[:, None]
    p, rows = np.exp(log_p), np.arange(len(target))
    d = -p * cotangent[:, None] / temperature
    d[rows, target] += cotangent / temperature
    logp = log_p[rows, target]
    return logp, -(p * log_p).sum(1), logits[rows, target] >= logits.max(1), d @ weight, d.T @ hidden


def gradients(hidden, weight, target, cotangent, known, **options):
    target, cotangent = jnp.asarray(target), jnp.asarray(cotangent)

    def total(hidden, weight):
        if known:
            result = score(hidden, weight, target, cotangent=cotangent, **options)
            return result.total, result
        result = score(hidden, weight, target, **options)
        return (cotangent * result.logp).sum(), result

    (value, result), grads = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(hidden, weight)
    return value, result, grads


@pytest.fixture(params=[2**19, 100], ids=["one block", "many blocks"])
def entries(request, monkeypatch):
    """Block sizes that give one block and several blocks of which the last overlaps."""
    monkeypatch.setattr(head, "BLOCK_ENTRIES", request.param)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("slots", "chunk"), [(1, 1024), (7, 1024), (40, 16), (33, 10)])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_values_and_gradients(entries, known, slots, chunk, temperature):
    hidden, weight, target, cotangent = data(slots)
    value, result, grads = gradients(hidden, weight, target, cotangent, known, temperature=temperature, chunk=chunk)
    logp, entropy, hit, dhidden, dweight = reference(hidden, weight, target, cotangent, temperature)
    np.testing.assert_allclose(result.logp, logp, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(result.entropy, entropy, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(result.hit, hit)
    np.testing.assert_allclose(value, (cotangent * logp).sum(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(grads[0], dhidden, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(grads[1], dweight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("known", [True, False])
def test_large_logits(entries, known):
    """Logits of several hundred: finite, and not less exact."""
    hidden, weight, target, cotangent = data(20, scale=60.0)
    _, result, grads = gradients(hidden, weight, target, cotangent, known)
    logp, entropy, _, dhidden, dweight = reference(hidden, weight, target, cotangent)
    np.testing.assert_allclose(result.logp, logp, rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(result.entropy, entropy, rtol=1e-2, atol=1e-3)
    np.testing.assert_allclose(grads[0], dhidden, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(grads[1], dweight, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("known", [True, False])
def test_gradient_of_a_confident_target_does_not_cancel(known):
    """p = 1 - 4e-8: p - 1 would be 0 or 6e-8 in float32, and nothing near it in bfloat16."""
    hidden, weight = np.array([[17.0]], np.float32), np.array([[1.0], [0.0]], np.float32)
    for dtype, tolerance in ((jnp.float32, 1e-5), (jnp.bfloat16, 1e-2)):
        _, _, (dhidden, _) = gradients(
            jnp.asarray(hidden, dtype), weight, np.zeros(1, np.int32), np.ones(1, np.float32), known
        )
        np.testing.assert_allclose(float(dhidden[0, 0]), 1 / (1 + np.exp(17)), rtol=tolerance)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("chunk", [1024, 16])
def test_bfloat16(entries, known, chunk):
    """Products of bfloat16 numbers, everything else float32: errors of single entries stay at bfloat16's rounding."""
    hidden, weight, target, cotangent = data(40, dim=32)
    low = jnp.asarray(hidden, jnp.bfloat16)
    _, result, grads = gradients(low, weight, target, cotangent, known, chunk=chunk)
    rounded = [np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32) for x in (hidden, weight)]
    logp, entropy, hit, dhidden, dweight = reference(*rounded, target, cotangent)
    assert [x.dtype for x in (result.logp, result.entropy, *grads)] == [jnp.float32] * 2 + [jnp.bfloat16, jnp.float32]
    np.testing.assert_allclose(result.logp, logp, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(result.entropy, entropy, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(result.hit, hit)
    for got, want in zip(grads, (dhidden, dweight), strict=True):
        error = np.asarray(got, np.float32) - want
        assert np.linalg.norm(error) < 4e-3 * np.linalg.norm(want)


@pytest.mark.parametrize("chunk", [1024, 16])
def test_slope(entries, chunk):
    """The gradient of sum(c * stop_gradient(exp(logp)) * logp), as DFT needs it."""
    hidden, weight, target, cotangent = data(40)
    value, _, grads = gradients(
        hidden, weight, target, cotangent, True, slope=lambda logp, known: known * jnp.exp(logp), chunk=chunk
    )
    logp, *_ = reference(hidden, weight, target, cotangent)
    *_, dhidden, dweight = reference(hidden, weight, target, cotangent * np.exp(logp))
    np.testing.assert_allclose(value, (cotangent * np.exp(logp) * logp).sum(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(grads[0], dhidden, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(grads[1], dweight, rtol=1e-4, atol=1e-5)


def test_gradient_of_a_multiple_of_total():
    hidden, weight, target, cotangent = (jnp.asarray(x) for x in data(10))
    grads = jax.grad(lambda h: 3 * score(h, weight, target, cotangent=cotangent).total)(hidden)
    *_, dhidden, _ = reference(*data(10))
    np.testing.assert_allclose(grads, 3 * dhidden, rtol=1e-4, atol=1e-5)


def test_logp_of_a_known_cotangent_is_not_differentiable():
    hidden, weight, target, cotangent = (jnp.asarray(x) for x in data(10))
    with pytest.raises(TypeError, match="leave out cotangent to differentiate logp"):
        jax.grad(lambda h: score(h, weight, target, cotangent=cotangent).logp.sum())(hidden)


def test_entropy_has_no_gradient():
    hidden, weight, target, _ = (jnp.asarray(x) for x in data(10))
    assert not np.any(jax.grad(lambda h: score(h, weight, target).entropy.sum())(hidden))


def test_ties_are_hits(entries):
    """The target's logit is the maximum, with others or alone, in whatever block."""
    hidden, weight = jnp.ones((50, 1)), jnp.where(jnp.arange(50) % 7 == 3, 1.0, 0.5)[:, None]
    hit = score(hidden, weight, jnp.arange(50, dtype=jnp.int32)).hit
    np.testing.assert_array_equal(hit, np.arange(50) % 7 == 3)


def test_not_more_than_a_chunk_of_logits():
    hidden, weight, target, cotangent = (jnp.asarray(x) for x in data(64, vocab=333))
    for known in (True, False):
        text = str(jax.make_jaxpr(lambda *args: gradients(*args, known, chunk=16))(hidden, weight, target, cotangent))  # noqa: B023
        assert "16]" in text
        sizes = {int(np.prod([int(n) for n in shape.split(",")])) for shape in re.findall(r"\[([\d,]+)\]", text)}
        assert max(sizes) <= 336 * 16


def test_refusals():
    hidden, weight, target, _ = (jnp.asarray(x) for x in data(3))
    with pytest.raises(ValueError, match=r"temperature 0.0 and chunk 1024 must be positive"):
        score(hidden, weight, target, temperature=0.0)
    with pytest.raises(ValueError, match="chunk 0 must be positive"):
        score(hidden, weight, target, chunk=0)


@pytest.mark.parametrize("known", [True, False])
def test_sharded_over_devices(entries, known):
    """Slots split over two devices, the weight on both: values as on one, the weight's gradient summed."""
    hidden, weight, target, cotangent = (jnp.asarray(x) for x in data(40))
    mesh, rows = make_mesh(2), PartitionSpec("data")

    def on_device(hidden, weight, target, cotangent):
        def total(hidden, weight):
            if known:
                return score(hidden, weight, target, cotangent=cotangent, chunk=16).total
            return (cotangent * score(hidden, weight, target, chunk=16).logp).sum()

        value, grads = jax.value_and_grad(total, (0, 1))(hidden, weight)
        return lax.psum(value, "data"), *grads

    run = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(rows, PartitionSpec(), rows, rows),
        out_specs=(PartitionSpec(), rows, PartitionSpec()),
    )
    value, dhidden, dweight = jax.jit(run)(hidden, weight, target, cotangent)
    logp, _, _, want_hidden, want_weight = reference(*data(40))
    np.testing.assert_allclose(value, (np.asarray(cotangent) * logp).sum(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dhidden, want_hidden, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dweight, want_weight, rtol=1e-4, atol=1e-5)
