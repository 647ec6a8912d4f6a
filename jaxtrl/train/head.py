"""The LM head: log-prob, entropy and hit of target tokens, without a [slots, vocabulary] matrix of logits.

Logits are computed in blocks of [vocabulary rows, slots] that stay in the cache, with an online softmax over the blocks
(https://arxiv.org/abs/1805.02867). Where the loss is a known function of the log-probs, its gradient is formed in the
same pass: the expected weight row sum_v exp(logit_v - running maximum) W_v, which is all that the gradient of `hidden`
and the entropy (hidden . expected row is the expected logit) need, is summed beside the softmax, and the exponentials
of one chunk of slots are kept for the gradient of the weight. What the later maxima and the sum change about them is
one factor per (block, slot), applied to the small [slots, D] side of that product. So three products in all and no
further pass over the vocabulary; otherwise the logits are recomputed (four products).

The target's entry is left out of these sums. Its gradient p - 1 = -(sum of the others) / sum does not cancel, which
matters in bfloat16, and is added as whole rows; its logit is a product of rows as well, no search through the block.

With the vocabulary cut over "tensor", the statistics of the parts are combined (the maximum, and the sums relative to
it); a target outside of a part matches no row of it. With the weight's columns cut over "fsdp", blocks of rows are
gathered where they are visited, and their gradient is summed and cut again at once.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Num

from jaxtrl.model.sharding import Shards, add_rows, gather, own_ids, sum_over_tensor, take_rows, vary, varying_axes

MAX_CHUNK = 1024  # slots; the kept [vocabulary, chunk] buffer is the largest array of a step
CUT_CHUNK = 512  # the same where parameters are cut over "fsdp" for the sake of memory; each chunk gathers all blocks
BLOCK_ENTRIES = 2**19  # of a block of logits; measured on a CPU with 1 MiB of L2 cache per core
ROUNDING = 2.0**-18  # of a sum of float32 products, relative to the sum of their magnitudes


class Score(NamedTuple):
    """Of each slot: log-prob of its target, entropy of its distribution, and whether the target has the largest logit.

    `total` is the sum of logp times its derivative, 0 without a cotangent. Entropy and hit carry no gradient.
    """

    logp: Float[Array, "u"]
    entropy: Float[Array, "u"]
    hit: Bool[Array, "u"]
    total: Float[Array, ""]


def score(
    hidden: Float[Array, "u d"],
    weight: Float[Array, "vocab part"],
    target: Int[Array, "u"],
    temperature: float = 1.0,
    cotangent: Num[Array, "u"] | None = None,
    slope: Callable[[Array, Array], Array] | None = None,
    chunk: int = MAX_CHUNK,
    shards: Shards = Shards(),
) -> Score:
    """log softmax(hidden @ weight.T / temperature)[target] and its companions; float32 whatever `hidden.dtype` is.

    Products are computed in `hidden.dtype` with float32 sums; the gradient of `weight` is in its own dtype. Without
    `cotangent`, `logp` is differentiable. With it, `total` is, and only it: the gradient of `total` with respect to
    `logp` is `cotangent` or, with `slope`, slope(logp, cotangent), which is called with the slots of one chunk at a
    time and taken as constant. It is known before the backward pass, which then costs no further product;
    differentiating `logp` raises TypeError. `chunk` bounds how many slots are computed at a time. `shards`: how
    `weight` is cut over devices. Targets must lie in [0, vocab). Raises ValueError for a temperature or chunk that is
    not positive.
    """
    if temperature <= 0 or chunk < 1:
        raise ValueError(f"temperature {temperature} and chunk {chunk} must be positive")
    chunk = min(chunk, max_chunk(shards))
    axes = varying_axes((hidden, weight, target, cotangent))
    hidden, weight = vary((hidden, weight), axes)  # so the gradient of hidden is summed over "tensor"
    target, cotangent = vary((target, cotangent), axes - {"tensor"})
    if cotangent is None:
        logp, entropy, hit = _score(hidden, weight, target, temperature, chunk, shards)
        total = jnp.zeros((), jnp.float32)
    else:
        constants = lax.stop_gradient(cotangent)
        total, (logp, entropy, hit) = _total(hidden, weight, target, constants, temperature, slope, chunk, shards)
        logp = _undifferentiable(logp)
    return Score(logp, lax.stop_gradient(entropy), hit, total)


class _Statistics(NamedTuple):
    """Over the vocabulary, of each slot of a chunk. Sums leave the target out and are relative to exp(top)."""

    top: Array  # largest logit, the target's included
    others: Array  # sum of exp(logit - top)
    weighted: Array  # sum of exp(logit - top) * (logit - top)
    picked: Array  # the target's logit
    rounding: Array  # how far `picked` may lie below the same logit as `top` saw it

    def log_sum(self) -> Array:
        return self.top + jnp.log(self.others + jnp.exp(self.picked - self.top))

    def results(self) -> tuple[Array, Array, Array]:
        """logp, entropy, hit. Relative to `top`, so that large logits cost no digits."""
        own = self.picked - self.top
        total = self.others + jnp.exp(own)
        log_total = jnp.log(total)
        return own - log_total, log_total - (self.weighted + jnp.exp(own) * own) / total, own >= -self.rounding

    def remainder(self) -> Array:
        """p(target) - 1, the derivative of -logp by the target's logit."""
        return -self.others * jnp.exp(self.top - self.log_sum())


class _Blocks(NamedTuple):
    """The vocabulary cut into blocks of one size. The last begins where it still fits, `fresh` is its first new row."""

    number: Array
    start: Array
    fresh: Array

    @staticmethod
    def size(vocab: int, slots: int) -> int:
        # An accelerator has no cache to stay in, but a cost per loop step.
        entries = BLOCK_ENTRIES if jax.default_backend() == "cpu" else 16 * BLOCK_ENTRIES
        count = max(1, round(vocab * slots / entries))
        return min(vocab, _round_up(-(-vocab // count), 16))

    @classmethod
    def of(cls, vocab: int, slots: int, axes: frozenset[str]) -> "_Blocks":
        size = cls.size(vocab, slots)
        number = jnp.arange(-(-vocab // size), dtype=jnp.int32)
        return vary(cls(number, jnp.minimum(number * size, vocab - size), number * size), axes)


def _logits(hidden: Array, rows: Array, temperature: float) -> Array:
    """[block, slots] float32. Vocabulary first: sums over it are then sums of vectors."""
    logits = _dot(rows, hidden, 1, 1)
    return logits if temperature == 1.0 else logits / temperature


def _dot(a: Array, b: Array, i: int, j: int) -> Array:
    """Product that contracts axis i of a with axis j of b, summed in float32."""
    return lax.dot_general(a, b, (((i,), (j,)), ((), ())), preferred_element_type=jnp.float32)


def _targets(hidden, own_rows, temperature):
    """The targets' logits, and how much another order of summation may change them."""
    products = hidden.astype(jnp.float32) * own_rows
    picked, magnitude = sum_over_tensor(jnp.stack([products.sum(-1), jnp.abs(products).sum(-1)]) / temperature)
    return picked, ROUNDING * magnitude


def _rows(weight: Array, block: _Blocks, size: int, shards: Shards) -> Array:
    """Rows of a block of the vocabulary, all their columns."""
    rows = lax.dynamic_slice_in_dim(weight, block.start, size)
    return gather(rows, 1) if shards.fsdp > 1 else rows


def _statistics(hidden, weight, target, own_rows, temperature, shards, kept=None):
    """Statistics of one chunk of slots; `own_rows` are the targets' rows of `weight` in float32.

    With a buffer `kept` [blocks, size, slots] it is filled with exp(logit - maximum so far), 0 for the targets, and
    what comes back with it is those maxima [blocks, slots] and the sum of exp(logit - top) * row over all rows of
    `weight` but the target's, [D, slots] float32.
    """
    axes = varying_axes((hidden, weight, target))
    vocab, slots = weight.shape[0], hidden.shape[0]
    size = _Blocks.size(vocab, slots)
    picked, rounding = _targets(hidden, own_rows, temperature)
    target = own_ids(weight, target, shards)
    by_row = kept is not None and kept.dtype == jnp.float32  # rounded to bfloat16, rows are too coarse for an entropy

    def visit(carry, block):
        top, others, weighted, gradient = carry
        rows = _rows(weight, block, size, shards)
        logits = _logits(hidden, rows, temperature)
        row = block.start + lax.broadcasted_iota(jnp.int32, (size, 1), 0)
        highest = jnp.maximum(top, logits.max(0))
        below = logits - highest
        e = jnp.where((row == target) | (row < block.fresh), 0.0, jnp.exp(below))
        shrink = jnp.exp(top - highest)
        if not by_row:
            weighted = (weighted + others * (top - highest)) * shrink + (e * below).sum(0)
        if gradient is not None:
            kept, expected = gradient
            entries = e.astype(kept.dtype)
            expected = expected * shrink + _dot(_transposed(rows, slots), entries, 1, 0)
            gradient = lax.dynamic_update_index_in_dim(kept, entries, block.number, 0), expected
        return (highest, others * shrink + e.sum(0), weighted, gradient), None if gradient is None else highest

    zeros = jnp.zeros(slots, jnp.float32)
    gradient = None if kept is None else (kept, jnp.zeros(hidden.shape[::-1], jnp.float32))
    start = vary((picked, zeros, zeros, gradient), axes)
    (own_top, others, weighted, gradient), tops = lax.scan(visit, start, _Blocks.of(vocab, slots, axes))
    if by_row:
        weighted = (hidden * gradient[1].T).sum(-1) / temperature - own_top * others
    top, others, weighted = _combine(own_top, others, weighted, shards)
    statistics = _Statistics(top, others, weighted, picked, rounding)
    if gradient is None:
        return statistics
    kept, expected = gradient
    return statistics, kept, tops, expected if shards.tensor == 1 else expected * jnp.exp(own_top - top)


def _combine(top: Array, others: Array, weighted: Array, shards: Shards) -> tuple[Array, Array, Array]:
    """The largest logit and the two sums relative to it of the whole vocabulary, from those of its parts."""
    if shards.tensor == 1:
        return top, others, weighted
    highest = lax.pmax(top, "tensor")
    below = top - highest
    sums = jnp.stack([others, weighted + others * below]) * jnp.exp(below)
    return (highest, *sum_over_tensor(sums))


def _transposed(rows: Array, slots: int) -> Array:
    """On a CPU really so where it pays: XLA's kernel for a product that contracts its first operand's first axis is a
    fifth slower, which 1,024 slots make worth a transpose and 512 do not (both measured; 768 lies between)."""
    return lax.optimization_barrier(rows.T) if jax.default_backend() == "cpu" and slots >= 768 else rows.T


def _add_rows(dweight: Array, block: _Blocks, e: Array, scaled: Array, shards: Shards) -> Array:
    """`dweight` plus e [size, slots] @ scaled [slots, D] at the rows of the block."""
    new = _dot(e, scaled, 1, 0)
    if shards.fsdp > 1:
        new = lax.psum_scatter(new, "fsdp", scatter_dimension=1, tiled=True)
    part = lax.dynamic_slice_in_dim(dweight, block.start, e.shape[0]) + new
    return lax.dynamic_update_slice_in_dim(dweight, part, block.start, 0)


def _chunk_size(total: int, chunk: int) -> int:
    """Slots per chunk: as few chunks as `chunk` allows, all of one size."""
    count = -(-total // chunk)
    return total if count <= 1 else min(chunk, _round_up(-(-total // count), 16))


def _by_chunk(function, carry, slots, chunk):
    """`function(carry, slots of one chunk) -> carry, results` over chunks of equal size, padded with zeros."""
    total = slots[0].shape[0]
    size = _chunk_size(total, chunk)
    count = -(-total // size)
    if count == 1:
        return function(carry, slots)
    padded = [jnp.pad(x, [(0, count * size - total)] + [(0, 0)] * (x.ndim - 1)) for x in slots]
    carry, results = lax.scan(function, carry, tuple(x.reshape(count, size, *x.shape[1:]) for x in padded))
    return carry, jax.tree.map(lambda x: x.reshape(count * size, *x.shape[2:])[:total], results)


def max_chunk(shards: Shards) -> int:
    """Slots that are computed at a time."""
    return MAX_CHUNK if shards.fsdp == 1 else CUT_CHUNK


def kept_entries(vocab: int, slots: int, shards: Shards = Shards()) -> int:
    """Entries of the buffer that holds one chunk's exponentials, the largest array of a train step."""
    vocab, slots = vocab // shards.tensor, _chunk_size(slots, max_chunk(shards))
    size = _Blocks.size(vocab, slots)
    return -(-vocab // size) * size * slots


# --- log-probs with a gradient that is not known before the backward pass: logits are recomputed there ---


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _score(hidden, weight, target, temperature, chunk, shards):
    return _score_forward(hidden, weight, target, temperature, chunk, shards)[0]


def _score_forward(hidden, weight, target, temperature, chunk, shards):
    cast = weight.astype(hidden.dtype)

    def visit(_, slots):
        hidden, target = slots
        own_rows = take_rows(cast, target, shards, jnp.float32)
        statistics = _statistics(hidden, cast, target, own_rows, temperature, shards)
        return None, (statistics.results(), statistics.log_sum(), statistics.remainder())

    _, (results, log_sum, remainder) = _by_chunk(visit, None, (hidden, target), chunk)
    return results, (hidden, weight, target, log_sum, remainder)


def _score_backward(temperature, chunk, shards, saved, cotangents):
    hidden, weight, target, log_sum, remainder = saved
    cast = weight.astype(hidden.dtype)
    axes = varying_axes((saved, cotangents))

    def visit(dweight, slots):
        hidden, target, log_sum, remainder, cotangent = slots
        scaled = (hidden * cotangent[:, None]).astype(hidden.dtype)
        size = _Blocks.size(cast.shape[0], hidden.shape[0])
        target = own_ids(cast, target, shards)

        def visit_block(carry, block):
            dhidden, dweight = carry
            rows = _rows(cast, block, size, shards)
            row = block.start + lax.broadcasted_iota(jnp.int32, (size, 1), 0)
            e = jnp.where(row == target, remainder, jnp.exp(_logits(hidden, rows, temperature) - log_sum))
            e = jnp.where(row < block.fresh, 0.0, e).astype(hidden.dtype)
            dhidden = dhidden + _dot(_transposed(rows, e.shape[1]), e, 1, 0)
            return (dhidden, _add_rows(dweight, block, e, scaled, shards)), None

        start = vary(jnp.zeros(hidden.shape[::-1], jnp.float32), axes)
        blocks = _Blocks.of(cast.shape[0], hidden.shape[0], axes)
        (dhidden, dweight), _ = lax.scan(visit_block, (start, dweight), blocks)
        return dweight, (dhidden.T * cotangent[:, None]).astype(hidden.dtype)

    start = vary(jnp.zeros(weight.shape, jnp.float32), axes)
    slots = (hidden, target, log_sum, remainder, cotangents[0] / -temperature)
    dweight, dhidden = _by_chunk(visit, start, slots, chunk)
    return dhidden, dweight.astype(weight.dtype), None


_score.defvjp(_score_forward, _score_backward)


# --- a weighted sum of log-probs: its gradient is formed in the same pass ---


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def _total(hidden, weight, target, cotangent, temperature, slope, chunk, shards):
    results = _score_forward(hidden, weight, target, temperature, chunk, shards)[0]
    return _weighted_sum(results[0], _sloped(cotangent, slope, results[0])), results


def _sloped(cotangent, slope, logp):
    return cotangent if slope is None else slope(logp, cotangent)


def _weighted_sum(logp, cotangent):
    return jnp.where(cotangent != 0, cotangent * logp, 0.0).sum()


def _total_forward(hidden, weight, target, cotangent, temperature, slope, chunk, shards):
    cast = weight.astype(hidden.dtype)
    axes = varying_axes((hidden, weight, target, cotangent))

    def visit(carry, slots):
        hidden, target, cotangent = slots
        dweight, kept = carry
        own_rows = take_rows(cast, target, shards, jnp.float32)
        statistics, kept, tops, expected = _statistics(hidden, cast, target, own_rows, temperature, shards, kept)
        results, log_sum = statistics.results(), statistics.log_sum()
        cotangent = _sloped(cotangent, slope, results[0])
        scaled = cotangent / temperature

        def visit_block(dweight, xs):
            block, top = xs
            factor = scaled * jnp.exp(top - log_sum)
            e = lax.dynamic_index_in_dim(kept, block.number, 0, keepdims=False)
            return _add_rows(dweight, block, e, (hidden * -factor[:, None]).astype(hidden.dtype), shards), None

        blocks = _Blocks.of(cast.shape[0], hidden.shape[0], axes)
        dweight, _ = lax.scan(visit_block, dweight, (blocks, tops))
        onto_target = -scaled * statistics.remainder()
        dhidden = expected.T * (-scaled * jnp.exp(statistics.top - log_sum))[:, None]
        dhidden = dhidden + onto_target[:, None] * own_rows
        return (dweight, kept), (results, cotangent, onto_target, dhidden.astype(hidden.dtype))

    slots = _chunk_size(hidden.shape[0], chunk)
    size = _Blocks.size(weight.shape[0], slots)
    buffer = jnp.zeros((-(-weight.shape[0] // size), size, slots), hidden.dtype)
    (dweight, _), (results, cotangent, onto_target, dhidden) = _by_chunk(
        visit, vary((jnp.zeros(weight.shape, jnp.float32), buffer), axes), (hidden, target, cotangent), chunk
    )
    dweight = add_rows(dweight, target, onto_target[:, None] * hidden, shards)
    total = _weighted_sum(results[0], cotangent)
    return (total, results), (dhidden, dweight.astype(weight.dtype))


def _total_backward(temperature, slope, chunk, shards, saved, cotangents):
    dhidden, dweight = saved
    return (dhidden * cotangents[0]).astype(dhidden.dtype), (dweight * cotangents[0]).astype(dweight.dtype), None, None


_total.defvjp(_total_forward, _total_backward)


@jax.custom_vjp
def _undifferentiable(logp):
    return logp


def _refuse(_, cotangent):
    raise TypeError("score(cotangent=...) has the gradient of `total` only: leave out cotangent to differentiate logp")


_undifferentiable.defvjp(lambda logp: (logp, None), _refuse)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
