"""Products of a few rows with a large matrix at the speed of the memory, on CPU.

XLA's matrix product packs its operands: for the 8 rows of a decoding step it reads weights at a fraction of the rate
that the memory has. Written as one reduction with an operand per row, the weights pass through the registers once, and
the rows stay in the first-level cache. It needs COMPILER_OPTIONS: only where the sums of a reduction may be reordered
is the loop over the inner axis one of vectors. NaN and infinity keep their meaning.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxtrl.model.qwen3 import Linear

COMPILER_OPTIONS = {"xla_cpu_enable_fast_math": True}
ROWS = 8  # that one reduction takes: an accumulator each
MOST_ROWS = 16  # from which on the matrix product is as fast
BLOCK = 128  # rows of the weights that the inner loops run over


def product(x: Float[Array, "n i"], weight: Float[Array, "o i"]) -> Float[Array, "n o"]:
    """x @ weight.T in float32."""
    if not 1 < x.shape[0] <= MOST_ROWS:
        return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    rows = _computed_once(x.astype(jnp.float32))
    blocks = weight.reshape(-1, math.gcd(weight.shape[0], BLOCK), weight.shape[1]).astype(jnp.float32)
    out: list[Array] = []
    for first in range(0, x.shape[0], ROWS):
        products = [blocks * row for row in rows[first : first + ROWS]]
        out += lax.reduce(products, [np.float32(0)] * len(products), _add, (2,))
    return jnp.stack([y.reshape(-1) for y in out])


def _computed_once(x: Float[Array, "n i"]) -> Float[Array, "n i"]:
    """x / 1 for numbers: XLA repeats what computes its input for every row of the weights, but no division."""
    return x / jnp.where(jnp.isfinite(x), 1.0, jnp.nan)


def _add(a: list[Array], b: list[Array]) -> list[Array]:
    return [x + y for x, y in zip(a, b, strict=True)]


class SkinnyLinear(Linear):
    """A `Linear` whose kernel is stored as [out, in]."""

    def __call__(self, x: Float[Array, "n i"]) -> Float[Array, "n o"]:
        y = product(x, self.kernel.get_value().astype(x.dtype)).astype(x.dtype)
        return y if self.bias is None else y + self.bias.get_value().astype(x.dtype)
