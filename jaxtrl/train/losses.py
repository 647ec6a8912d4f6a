"""Losses over the terms of a row, and sums over the terms of one slot or one sample (DESIGN.md section 6).

A supervised loss is a function of a term's log-prob alone, so the terms of one slot are one loss with their summed
weight: sum_t weight_t l(logp[slot_t]) = sum_s weight_s l(logp_s). Divided once, over all micro-batches and devices.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxtrl.model.sharding import vary, varying_axes

CHUNK = 256  # slots or terms compared with all terms at a time


class SupervisedLoss(NamedTuple):
    """A loss l(logp) = -slope(logp) * logp where the slope is taken as constant, so that l' = -slope(logp)."""

    slope: Callable[[Array], Array] | None  # None: 1
    value: Callable[[Array], Array]


def nll(logp: Float[Array, "n"]) -> Float[Array, "n"]:
    """Negative log-likelihood, -log p."""
    return -logp


def dft(logp: Float[Array, "n"]) -> Float[Array, "n"]:
    """Dynamic fine-tuning, -stop_gradient(p) log p: NLL weighted by p (https://arxiv.org/abs/2508.05629)."""
    return -lax.stop_gradient(jnp.exp(logp)) * logp


SUPERVISED = {"nll": SupervisedLoss(None, nll), "dft": SupervisedLoss(jnp.exp, dft)}


def supervised_loss(loss_type: str) -> SupervisedLoss:
    """The loss of that name; raises ValueError for another."""
    if loss_type not in SUPERVISED:
        raise ValueError(f"loss_type is {loss_type!r}: use one of {', '.join(SUPERVISED)}")
    return SUPERVISED[loss_type]


def sum_by_slot(columns: Float[Array, "t k"], term_slot: Int[Array, "t"], slots: int) -> Float[Array, "slots k"]:
    """Sum of the terms of each slot."""
    return _sum_equal(columns, term_slot, lax.iota(jnp.int32, slots))


@jax.custom_vjp
def sum_by_sample(values: Float[Array, "t"], term_sample: Int[Array, "t"]) -> Float[Array, "t"]:
    """For each term the sum over all terms of its sample. Samples may have any numbers."""
    return _sum_equal(values[:, None], term_sample, term_sample)[:, 0]


sum_by_sample.defvjp(
    lambda values, term_sample: (sum_by_sample(values, term_sample), term_sample),
    lambda term_sample, cotangent: (sum_by_sample(cotangent, term_sample), None),
)


def _sum_equal(columns: Array, key: Array, wanted: Array) -> Array:
    """[wanted, k]: for each wanted number the sum of the rows with that key. A product with [wanted, rows] comparisons,
    made in chunks (a scatter of scalars is slow on Neuron, and so would be the gradient of a gather)."""
    count = -(-wanted.shape[0] // CHUNK)
    chunks = jnp.pad(wanted, (0, count * CHUNK - wanted.shape[0])).reshape(count, CHUNK)
    columns = columns.astype(jnp.float32)

    def chunk(numbers):
        own = (numbers[:, None] == key).astype(jnp.float32)
        return jnp.dot(own, columns, precision=lax.Precision.HIGHEST)

    sums = lax.map(chunk, vary(chunks, varying_axes((columns, key))))
    return sums.reshape(count * CHUNK, -1)[: wanted.shape[0]]


@jax.custom_vjp
def take_slots(values: Float[Array, "slots"], term_slot: Int[Array, "t"]) -> Float[Array, "t"]:
    """values[term_slot], differentiable without a scatter."""
    return values[term_slot]


def _take_backward(saved, cotangent):
    values, term_slot = saved
    total = sum_by_slot(cotangent[:, None], term_slot, values.shape[0])[:, 0]
    missing = varying_axes(total) - varying_axes(values)
    return (lax.psum(total, tuple(sorted(missing))) if missing else total), None


take_slots.defvjp(lambda values, term_slot: (values[term_slot], (values, term_slot)), _take_backward)
