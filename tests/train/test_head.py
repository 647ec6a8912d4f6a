"""Head: values and gradients against a float64 NumPy reference and a plain log-softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrl.train import head
from jaxtrl.train.head import score


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


@pytest.fixture(params=[2**20, 100], ids=["one block", "many blocks"])
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
