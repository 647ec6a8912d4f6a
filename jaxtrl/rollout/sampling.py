"""Drawing a token on the device from logits and one uniform number of the host: no randomness, sort, top_k or cumsum.

All is written for one slot and mapped over the slots by the caller. The vocabulary is laid out as `[blocks, width]`
with both sides near its square root: sums run over short rows, and the inverse of the distribution function is found in
two levels, first the block, then the token in it. What a filter keeps is always "logits from a threshold up", so ties
at the threshold are kept, as Transformers keeps them under top_k. Thresholds are found by bisection over the float32
numbers themselves (as integers in the same order): 32 halvings give the exact one.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

MASKED = -1e30  # finite: exp(MASKED - maximum) is exactly 0


class Controls(NamedTuple):
    """Sampling parameters of one slot; with a leading axis, of all. All are traced: no value needs a new program."""

    temperature: Float[Array, "*slots"] | Float[np.ndarray, "*slots"]  # 0: the most likely token
    top_k: Int[Array, "*slots"] | Int[np.ndarray, "*slots"]  # 0: off
    top_p: Float[Array, "*slots"] | Float[np.ndarray, "*slots"]  # 1: off
    min_p: Float[Array, "*slots"] | Float[np.ndarray, "*slots"]  # 0: off
    repetition_penalty: Float[Array, "*slots"] | Float[np.ndarray, "*slots"]  # 1: off


class Drawn(NamedTuple):
    """A token, its log-prob under softmax(logits / temperature), and that under the distribution it was drawn from.

    The second differs from the first where tokens are filtered, penalised or forbidden. At temperature 0 the first is
    that at temperature 1 and the second is 0: nothing else could be drawn.
    """

    token: Int[Array, ""]
    logp: Float[Array, ""]
    sampled_logp: Float[Array, ""]


def draw(
    logits: Float[Array, "vocab"],
    uniform: Float[Array, ""],
    controls: Controls,
    seen: Bool[Array, "vocab"] | None = None,
    forbidden: Bool[Array, "vocab"] | None = None,
) -> Drawn:
    """One token of softmax(logits / temperature) for float32 logits and a uniform number in [0, 1).

    With `seen` (tokens of prompt and completion so far) and `forbidden` given, everything applies, in Transformers'
    order: repetition_penalty (https://arxiv.org/abs/1909.05858) on what was seen, forbidden tokens, temperature, the
    top_k largest, of those the fewest that hold top_p of the mass (https://arxiv.org/abs/1904.09751), and of those the
    ones at least min_p times as likely as the first (https://arxiv.org/abs/2407.01082). Without, temperature alone
    does. At temperature 0 the first of the largest logits is taken.
    """
    temperature = jnp.where(controls.temperature > 0, controls.temperature, 1.0)
    plain = _blocks(logits / temperature)
    scores = plain
    if seen is not None and forbidden is not None:
        penalty = jnp.where(logits < 0, controls.repetition_penalty, 1 / controls.repetition_penalty)
        allowed = jnp.where(seen, logits * penalty, logits) / temperature
        scores = _blocks(jnp.where(forbidden, MASKED, allowed))
    top = scores.max()
    weights = jnp.exp(scores - top)
    if seen is not None:
        weights = _filtered(scores, weights, controls)
    number = _numbers(*scores.shape)
    greedy = jnp.where(scores >= top, number, scores.size).min()
    token = jnp.where(controls.temperature > 0, pick(weights, uniform), greedy)
    score, logit = (jnp.where(number == token, x, 0.0).sum() for x in (scores, plain))
    log_sum = plain.max() + jnp.log(_total(jnp.exp(plain - plain.max())))
    sampled_logp = jnp.where(controls.temperature > 0, score - top - jnp.log(_total(weights)), 0.0)
    return Drawn(token, logit - log_sum, sampled_logp)


def pick(weights: Float[Array, "blocks width"], uniform: Float[Array, ""]) -> Int[Array, ""]:
    """The token whose share of the weights, laid end to end, holds the point `uniform` in [0, 1) of their sum.

    Its weight is never 0, however sums are rounded.
    """
    sums = weights.sum(axis=1)
    below = _running_sums(sums)
    point = uniform * below[-1]
    block = _first_above(below, sums, point)
    # What lies before the block, as a sum over a mask: the running sum of its predecessor is no row to gather.
    before = jnp.where(lax.iota(jnp.int32, sums.shape[0]) == block, below - sums, 0.0).sum()
    row = lax.dynamic_index_in_dim(weights, block, 0, keepdims=False)
    return block * weights.shape[1] + _first_above(_running_sums(row), row, point - before)


def _first_above(below: Array, weights: Array, point: Array) -> Array:
    """The first index with a weight whose running sum exceeds `point`; by rounding none may: then the last weight."""
    index = lax.iota(jnp.int32, weights.shape[0])
    first = jnp.where((below > point) & (weights > 0), index, weights.shape[0]).min()
    return jnp.where(first < weights.shape[0], first, jnp.where(weights > 0, index, 0).max())


def _running_sums(x: Array) -> Array:
    """cumsum as a product with a triangle; a cumsum of its own lowers to a window as long as the vector."""
    triangle = np.triu(np.ones((x.shape[0], x.shape[0]), np.float32))
    return jnp.dot(x, triangle, precision=lax.Precision.HIGHEST)


def _filtered(scores: Array, weights: Array, controls: Controls) -> Array:
    """The weights with 0 for what top_k, top_p and min_p leave out."""
    wanted = jnp.where(controls.top_k > 0, controls.top_k, scores.size).astype(jnp.float32)
    least = _threshold(scores, lambda kept: _total(kept.astype(jnp.float32)), wanted)
    weights = jnp.where(scores >= least, weights, 0.0)
    least = _threshold(
        scores, lambda kept: _total(jnp.where(kept, weights, 0.0)), jnp.asarray(controls.top_p) * _total(weights)
    )
    keep = (controls.top_p >= 1) | (scores >= least)
    return jnp.where(keep & (weights >= controls.min_p), weights, 0.0)


def _threshold(scores: Array, measure: Callable[[Array], Array], wanted: Array) -> Array:
    """The largest float32 number t with measure(scores >= t) >= wanted; the smallest score if there is none."""

    def halve(_, interval):
        low, high = interval
        middle = (low | high) - ((low ^ high) >> 1)  # rounded up, without overflow
        enough = measure(scores >= _number(middle)) >= wanted
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    return _number(lax.fori_loop(0, 32, halve, (_order(scores.min()), _order(scores.max())))[0])


def _order(x: Array) -> Array:
    """int32 in the order of the float32 numbers."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _number(order: Array) -> Array:
    """The inverse of `_order`."""
    return lax.bitcast_convert_type(jnp.where(order < 0, order ^ 0x7FFFFFFF, order), jnp.float32)


def _blocks(x: Array) -> Array:
    """[vocab] as [blocks, width], filled up with MASKED."""
    width = 2 ** round(np.log2(x.shape[0]) / 2)
    return jnp.pad(x, (0, -x.shape[0] % width), constant_values=MASKED).reshape(-1, width)


def _numbers(blocks: int, width: int) -> Array:
    """The token of every place of `_blocks`."""
    return lax.iota(jnp.int32, blocks * width).reshape(blocks, width)


def _total(x: Array) -> Array:
    """The sum over both axes, down the columns first: sums of vectors, and of few numbers each."""
    return x.sum(axis=0).sum()


draw_slots = jax.vmap(draw)  # (logits [slots, vocab], uniform [slots], Controls of arrays [slots], ...)
