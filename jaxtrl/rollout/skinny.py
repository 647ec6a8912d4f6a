"""Products and reductions of a few rows at the speed of the memory, on CPU.

A reduction of several operands is what XLA compiles to one loop that reads the weights once, takes what computes its
operands into that loop, and runs on all cores; a single operand is written to memory first, and an x @ weight.T packs
the weights anew each time. It needs COMPILER_OPTIONS: only where the sums of a reduction may be reordered is the loop
over the inner axis one of vectors. NaN and infinity keep their meaning.
"""

import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxtrl.model.qwen3 import Linear

COMPILER_OPTIONS = {"xla_cpu_enable_fast_math": True}
ROWS = 8  # that one reduction takes: an accumulator each
MOST_ROWS = 16  # that are taken by reductions, ROWS at a time
FEW_ROWS = 64  # up to which a product is faster with the weights on its left
LONG = 1024  # inner axis of float32 from which on such a product is faster than a reduction
BLOCK = 128  # rows of the weights that the inner loops run over


def product(x: Float[Array, "n i"], weight: Float[Array, "o i"]) -> Float[Array, "n o"]:
    """x @ weight.T in float32; both of one dtype."""
    count, inner = x.shape
    if count > FEW_ROWS:
        return row_products(x, weight)
    if count > MOST_ROWS or (weight.dtype == jnp.float32 and (count == 1 or count > ROWS or inner >= LONG)):
        return lax.optimization_barrier(row_products(weight, x)).T  # without it XLA turns the product round
    rows = _computed_once(x.astype(jnp.float32))
    blocks = weight.reshape(-1, math.gcd(weight.shape[0], BLOCK), inner).astype(jnp.float32)
    out: list[Array] = []
    for first in range(0, count, ROWS):
        out += reduce_together([blocks * row for row in rows[first : first + ROWS]], lax.add, 0.0)
    return jnp.stack([y.reshape(-1) for y in out])


def row_products(a: Float[Array, "n i"], b: Float[Array, "o i"]) -> Float[Array, "n o"]:
    """a @ b.T in float32, as XLA does it."""
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def head_scores(q: Float[Array, "s h g d"], keys: Float[Array, "s h c d"]) -> Float[Array, "s h g c"]:
    """q keys^T of every slot and key head in float32, whose g queries are the operands of one reduction."""
    queries, keys = _computed_once(q.astype(jnp.float32)), keys.astype(jnp.float32)
    return jnp.stack(reduce_together([keys * queries[:, :, i, None] for i in range(q.shape[2])], lax.add, 0.0), axis=2)


def reduce_together(operands: list[Array], combine: Callable[[Array, Array], Array], start: float) -> list[Array]:
    """Each of the operands, of one shape, reduced over its last axis by one reduction of them all."""
    if len(operands) == 1:  # twice: its own one would be a reduction of a single operand
        first, second = reduce_together([operands[0]] * 2, combine, start)
        return [jnp.where(first == second, first, second)]
    axis = operands[0].ndim - 1
    return lax.reduce(
        operands,
        [np.float32(start)] * len(operands),
        lambda a, b: [combine(x, y) for x, y in zip(a, b, strict=True)],
        (axis,),
    )


def _computed_once(x: Float[Array, "*n i"]) -> Float[Array, "*n i"]:
    """x / 1 for numbers: XLA repeats what computes its input for every row of the weights, but no division."""
    return x / jnp.where(jnp.isfinite(x), 1.0, jnp.nan)


class SkinnyLinear(Linear):
    """A `Linear` whose kernel is stored as [out, in]."""

    def __call__(self, x: Float[Array, "n i"]) -> Float[Array, "n o"]:
        y = product(x, self.kernel.get_value().astype(x.dtype)).astype(x.dtype)
        return y if self.bias is None else y + self.bias.get_value().astype(x.dtype)
