"""Drawing a token on the device from logits and one uniform number of the host: no randomness, sort, top_k or cumsum.

All is written for one slot and mapped over the slots by the caller. The vocabulary is laid out as `[blocks, width]`
with both sides near its square root: sums run over short rows, and the inverse of the distribution function is found in
two levels, first the block, then the token in it. What a filter keeps is always "logits from a threshold up", so ties
at the threshold are kept, as Transformers keeps them under top_k. Thresholds are found by bisection over the float32
numbers themselves (as integers in the same order): 32 halvings give the exact one.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Float, Int

from jaxtrl.rollout.skinny import MOST_ROWS, reduce_together

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
    halvings: int = 1,
) -> Drawn:
    """One token of softmax(logits / temperature) for float32 logits and a uniform number in [0, 1).

    With `seen` (tokens of prompt and completion so far) and `forbidden` given, everything applies, in Transformers'
    order: repetition_penalty (https://arxiv.org/abs/1909.05858) on what was seen, forbidden tokens, temperature, the
    top_k largest, of those the fewest that hold top_p of the mass (https://arxiv.org/abs/1904.09751), and of those the
    ones at least min_p times as likely as the first (https://arxiv.org/abs/2407.01082). Without, temperature alone
    does. At temperature 0 the first of the largest logits is taken. `halvings` of an interval are done per pass over
    the scores; more than one needs reductions of several operands.
    """
    temperature = jnp.where(controls.temperature > 0, controls.temperature, 1.0)
    plain = _blocks(logits / temperature)
    scores = plain
    if seen is not None and forbidden is not None:
        scores = _blocks(jnp.where(forbidden, MASKED, _penalised(logits, seen, controls) / temperature))
    maxima, sums_of = (_maxima, _sums) if halvings > 1 else (_row_maxima, _row_sums)
    tops = maxima(scores)
    top = tops.max()
    weights = jnp.exp(scores - top)
    if seen is not None:
        weights = _filtered(scores, weights, controls, halvings)
    sums = sums_of(weights)
    block, before = _pick_block(sums, uniform)
    block = jnp.where(controls.temperature > 0, block, _first(tops >= top))
    score, logit = (lax.dynamic_index_in_dim(x, block, 0, keepdims=False) for x in (scores, plain))
    # Without a filter, computed again: then the weights of the whole vocabulary are summed and never stored.
    weight = jnp.exp(score - top) if seen is None else lax.dynamic_index_in_dim(weights, block, 0, keepdims=False)
    column = jnp.where(
        controls.temperature > 0, _first_above(_running_sums(weight), weight, before), _first(score >= top)
    )
    chosen = lax.iota(jnp.int32, score.shape[0]) == column
    score, logit = (jnp.where(chosen, x, 0.0).sum() for x in (score, logit))
    log_sum = top + jnp.log(sums.sum())
    sampled_logp = jnp.where(controls.temperature > 0, score - log_sum, 0.0)
    if seen is not None:
        top = maxima(plain).max()
        log_sum = top + jnp.log(sums_of(jnp.exp(plain - top)).sum())
    return Drawn(block * plain.shape[1] + column, logit - log_sum, sampled_logp)


def _row_maxima(x: Float[Array, "blocks width"]) -> Float[Array, "blocks"]:
    return x.max(axis=1)


def _row_sums(x: Float[Array, "blocks width"]) -> Float[Array, "blocks"]:
    return x.sum(axis=1)


# On CPU the slots are the operands of one reduction, which computes what it reduces as it goes (`skinny`).
_maxima, _sums = custom_vmap(_row_maxima), custom_vmap(_row_sums)


@_maxima.def_vmap
def _maxima_of_slots(slots: int, _, x: Float[Array, "slots blocks width"]) -> tuple[Array, bool]:
    return (jnp.stack(reduce_together(list(x), lax.max, -np.inf)) if slots <= MOST_ROWS else x.max(axis=2)), True


@_sums.def_vmap
def _sums_of_slots(slots: int, _, x: Float[Array, "slots blocks width"]) -> tuple[Array, bool]:
    return (jnp.stack(reduce_together(list(x), lax.add, 0.0)) if slots <= MOST_ROWS else x.sum(axis=2)), True


def pick(weights: Float[Array, "blocks width"], uniform: Float[Array, ""]) -> Int[Array, ""]:
    """The token whose share of the weights, laid end to end, holds the point `uniform` in [0, 1) of their sum.

    Its weight is never 0, however sums are rounded.
    """
    block, point = _pick_block(weights.sum(axis=1), uniform)
    row = lax.dynamic_index_in_dim(weights, block, 0, keepdims=False)
    return block * weights.shape[1] + _first_above(_running_sums(row), row, point)


def _pick_block(sums: Float[Array, "blocks"], uniform: Float[Array, ""]) -> tuple[Int[Array, ""], Float[Array, ""]]:
    """The block that holds the point, and the point from the start of that block."""
    below = _running_sums(sums)
    point = uniform * below[-1]
    block = _first_above(below, sums, point)
    # What lies before the block, as a sum over a mask: the running sum of its predecessor is no row to gather.
    before = jnp.where(lax.iota(jnp.int32, sums.shape[0]) == block, below - sums, 0.0).sum()
    return block, point - before


def _first(holds: Bool[Array, "n"]) -> Int[Array, ""]:
    """The first index for which it holds; n if there is none."""
    return jnp.where(holds, lax.iota(jnp.int32, holds.shape[0]), holds.shape[0]).min()


def _first_above(below: Array, weights: Array, point: Array) -> Array:
    """The first index with a weight whose running sum exceeds `point`; by rounding none may: then the last weight."""
    first = _first((below > point) & (weights > 0))
    last = jnp.where(weights > 0, lax.iota(jnp.int32, weights.shape[0]), 0).max()
    return jnp.where(first < weights.shape[0], first, last)


def _running_sums(x: Array) -> Array:
    """cumsum in two levels, each a product with a triangle; a cumsum of its own lowers to a window as long as x."""
    width = math.isqrt(x.shape[0] - 1) + 1
    rows = jnp.pad(x, (0, -x.shape[0] % width)).reshape(-1, width)
    within = jnp.dot(rows, _triangle(width, 0), precision=lax.Precision.HIGHEST)
    before = jnp.dot(within[:, -1], _triangle(rows.shape[0], 1), precision=lax.Precision.HIGHEST)
    return (within + before[:, None]).reshape(-1)[: x.shape[0]]


def _triangle(size: int, above: int) -> np.ndarray:
    return np.triu(np.ones((size, size), np.float32), above)


def _penalised(logits: Array, seen: Array, controls: Controls) -> Array:
    """Logits of seen tokens divided by the penalty where positive, times it where negative."""
    penalty = jnp.where(logits < 0, controls.repetition_penalty, 1 / controls.repetition_penalty)
    return jnp.where(seen, logits * penalty, logits)


def _filtered(scores: Array, weights: Array, controls: Controls, halvings: int = 1) -> Array:
    """The weights with 0 for what top_k, top_p and min_p leave out."""
    wanted = jnp.where(controls.top_k > 0, controls.top_k, scores.size).astype(jnp.float32)
    least = _threshold(scores, jnp.ones_like(weights), wanted, halvings)
    weights = jnp.where(scores >= least, weights, 0.0)
    total = weights.sum(axis=1).sum()
    least = _threshold(scores, weights, jnp.asarray(controls.top_p) * total, halvings)
    keep = (controls.top_p >= 1) | (scores >= least)
    return jnp.where(keep & (weights >= controls.min_p), weights, 0.0)


def _threshold(scores: Array, weights: Array, wanted: Array, halvings: int) -> Array:
    """The largest float32 number t with sum(weights where scores >= t) >= wanted; the smallest score if none has it.

    Every round measures all middles that the next `halvings` steps of a bisection could visit.
    """

    def narrow(interval, _):
        low, high = interval
        middles, parts = [], [interval]
        for _ in range(halvings):
            middles += [_middle(*part) for part in parts]
            parts = [
                new for (a, b), m in zip(parts, middles[-len(parts) :], strict=True) for new in ((a, m - 1), (m, b))
            ]
        for middle, total in zip(middles, _sums_from(scores, weights, middles), strict=True):
            low = jnp.where(total >= wanted, jnp.maximum(low, middle), low)
            high = jnp.where(total >= wanted, high, jnp.minimum(high, middle - 1))
        return (low, high), None

    start = _order(scores.min(axis=1).min()), _order(scores.max(axis=1).max())
    return _number(lax.scan(narrow, start, None, length=-(-32 // halvings))[0][0])


def _sums_from(scores: Array, weights: Array, orders: list[Array]) -> list[Array]:
    """For each threshold, the sum of the weights of the scores from it on; in one pass over the scores."""
    parts = [jnp.where(scores >= _number(order), weights, 0.0) for order in orders]
    if len(parts) == 1:
        return [parts[0].sum(axis=1).sum()]
    return [row.sum() for row in reduce_together(parts, lax.add, 0.0)]


def _middle(low: Array, high: Array) -> Array:
    return (low | high) - ((low ^ high) >> 1)  # rounded up, without overflow


def _order(x: Array) -> Array:
    """int32 in the order of the float32 numbers."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _number(order: Array) -> Array:
    """The inverse of `_order`."""
    return lax.bitcast_convert_type(jnp.where(order < 0, order ^ 0x7FFFFFFF, order), jnp.float32)


def _blocks(x: Array) -> Array:
    """[vocab] as [blocks, width], filled up with MASKED where no power of two near the square root divides vocab."""
    width = 2 ** round(np.log2(x.shape[0]) / 2)
    divisor = math.gcd(x.shape[0], width)
    width = divisor if 4 * divisor >= width else width
    return jnp.pad(x, (0, -x.shape[0] % width), constant_values=MASKED).reshape(-1, width)


def draw_slots(
    logits: Float[Array, "slots vocab"],
    uniform: Float[Array, "slots"],
    controls: Controls,
    seen: Bool[Array, "slots vocab"] | None = None,
    forbidden: Bool[Array, "slots vocab"] | None = None,
    halvings: int = 1,
) -> Drawn:
    """`draw` for every slot."""
    return jax.vmap(partial(draw, halvings=halvings))(logits, uniform, controls, seen, forbidden)
