"""The GRPO step: a policy loss on token rows, with the metrics that TRL reports (DESIGN.md sections 3 and 6)."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxtrl.model.config import Qwen3Config
from jaxtrl.rows.batch import RowBatch
from jaxtrl.train.losses import sum_by_sample, sum_by_slot, take_slots
from jaxtrl.train.policy import LARGEST, Evaluated, PolicyLoss
from jaxtrl.train.step import (
    Accumulated,
    Metrics,
    TrainStep,
    make_train_step,
    own_row,
    score_row,
    slot_weights,
)


class PolicySums(NamedTuple):
    """Sums over trained terms of any number of micro-batches; float32 scalars."""

    loss: Float[Array, ""]  # weighted
    denominator: Float[Array, ""]
    terms: Float[Array, ""]
    ratios: Float[Array, ""]  # their number: of terms, or of completions at sequence level
    importances: Float[Array, ""]
    entropy: Float[Array, ""]
    kl: Float[Array, ""]
    mismatch: Float[Array, ""]
    ratio: Float[Array, ""]
    low: Float[Array, ""]
    high: Float[Array, ""]
    importance: Float[Array, ""]


class PolicyPeaks(NamedTuple):
    """Largest values over trained terms of any number of micro-batches; float32 scalars, -LARGEST where there is none.

    The smallest value of something is minus the largest of its negative.
    """

    mismatch: Float[Array, ""]
    minus_low: Float[Array, ""]  # of the share of a completion's terms that are clipped
    high: Float[Array, ""]
    importance: Float[Array, ""]
    minus_importance: Float[Array, ""]

    @classmethod
    def of_nothing(cls) -> "PolicyPeaks":
        return cls(*(jnp.full((), -LARGEST, jnp.float32) for _ in cls._fields))


def make_grpo_step(
    config: Qwen3Config,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None = None,
    *,
    loss_type: str = "dapo",
    importance_sampling_level: str = "token",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    use_bias_correction_kl: bool = True,
    importance_sampling_mode: str | None = None,
    importance_sampling_clip_max: float | None = 3.0,
    importance_sampling_clip_min: float | None = None,
    temperature: float = 1.0,
    dtype: DTypeLike = jnp.float32,
    remat: str = "full",
    unroll: int = 1,
    donate: bool = True,
) -> TrainStep:
    """A pure step on `TrainState` and `RowBatch`es (of one row per device of `mesh`; their shapes may differ).

    The loss is sum(weight * l) / sum(denominator) over all batches and devices, l being the `PolicyLoss` of these
    options; `rows.advantages.normalise_row` makes the two columns for each `loss_type`. Batches need the columns
    `advantage` and `old_logp` (log-probs at `temperature`), with `beta` above 0 also `ref_logp`, with an
    `importance_sampling_mode` also `sampler_logp`; a batch without them is a ValueError when the step is traced.

    Metrics are float32 scalars, means over trained terms: loss, grad_norm, entropy, num_terms, skipped (as
    `make_sft_step`), ratio, clip_ratio/low_mean, high_mean, region_mean (cispo: cispo_clip_ratio), kl,
    sampling/sampling_logp_difference/mean and, with a mode, sampling/importance_sampling_ratio/mean. Where there is one
    ratio for each completion, means of ratios and of their clipping are over completions. sampling/.../max and min are
    over terms; clip_ratio/low_min and high_max over completions, of the share of its terms that is clipped.
    """
    policy = PolicyLoss(
        loss_type=loss_type,
        importance_sampling_level=importance_sampling_level,
        epsilon=epsilon,
        epsilon_high=epsilon_high,
        delta=delta,
        beta=beta,
        use_bias_correction_kl=use_bias_correction_kl,
        importance_sampling_mode=importance_sampling_mode,
        importance_sampling_clip_max=importance_sampling_clip_max,
        importance_sampling_clip_min=importance_sampling_clip_min,
    )

    def gradients(params: Any, batch: RowBatch) -> Accumulated:
        if missing := policy.missing_columns(batch):
            raise ValueError(f"the batch has no column {missing[0]}, which this loss needs: give it to the samples")
        row = own_row(batch)
        _, counts, used = slot_weights(row)
        numbers, slope = lax.iota(jnp.int32, used.shape[0]), partial(slope_of_chunk, policy, row)

        def total(params):
            if policy.is_per_term:
                scored = score_row(config, params, row, used, dtype, remat, unroll, temperature, numbers, slope)
                return scored.total, scored
            scored = score_row(config, params, row, used, dtype, remat, unroll, temperature)
            return _loss(policy.evaluate(take_slots(scored.logp, row.term_slot), row), row), scored

        (_, scored), grads = jax.value_and_grad(total, has_aux=True)(params)
        terms = policy.evaluate(scored.logp[row.term_slot], row)
        sums = _sums(row, jnp.where(used, counts * scored.entropy, 0.0).sum(), terms)
        return Accumulated(grads, sums, _peaks(row, terms))

    def metrics(acc: Accumulated) -> Metrics:
        return _metrics(policy, acc.sums) | _extremes(policy, acc)

    return make_train_step(config, gradients, PolicySums, metrics, optimizer, mesh, donate, PolicyPeaks.of_nothing)


def slope_of_chunk(
    policy: PolicyLoss, row: Any, logp: Float[Array, "chunk"], numbers: Int[Array, "chunk"]
) -> Float[Array, "chunk"]:
    """The derivative of the row's loss by the log-probs of some of its slots, which are numbered one after another.

    This lets the head form its gradient where it computes the log-probs (three products with the vocabulary, not four).
    """
    place = row.term_slot - numbers[0]
    inside = (place >= 0) & (place < logp.shape[0])
    own = jnp.where(inside, logp[jnp.clip(place, 0, logp.shape[0] - 1)], row.old_logp)
    derivative = jax.grad(lambda own: _loss(policy.evaluate(own, row), row))(own)
    return sum_by_slot(jnp.where(inside, derivative, 0.0)[:, None], place, logp.shape[0])[:, 0]


def _loss(terms: Evaluated, row: Any) -> Float[Array, ""]:
    return _sum_used(row, row.weight * terms.loss)


def _sum_used(row: Any, values: Array) -> Array:
    return jnp.where(row.weight != 0, values, 0.0).sum()


def _sums(row: Any, entropy: Array, terms: Evaluated) -> PolicySums:
    return PolicySums(
        loss=_loss(terms, row),
        denominator=row.denominator,
        terms=_sum_used(row, jnp.ones_like(row.weight)),
        ratios=_sum_used(row, terms.ratio_share),
        importances=_sum_used(row, terms.importance_share),
        entropy=entropy,
        kl=_sum_used(row, terms.kl),
        mismatch=_sum_used(row, terms.mismatch),
        ratio=_sum_used(row, terms.ratio_share * terms.ratio),
        low=_sum_used(row, terms.ratio_share * terms.low),
        high=_sum_used(row, terms.ratio_share * terms.high),
        importance=_sum_used(row, terms.importance_share * terms.importance),
    )


def _peaks(row: Any, terms: Evaluated) -> PolicyPeaks:
    used = row.weight != 0
    # A completion has one advantage, so that it is clipped on one side only: one sum does for both.
    count, clipped = (
        sum_by_sample(jnp.where(used, values, 0.0), row.term_sample)
        for values in (jnp.ones_like(row.weight), terms.low + terms.high)
    )
    share = clipped / jnp.maximum(count, 1.0)
    is_positive = row.advantage > 0
    values = PolicyPeaks(
        mismatch=terms.mismatch,
        minus_low=-jnp.where(is_positive, 0.0, share),
        high=jnp.where(is_positive, share, 0.0),
        importance=terms.importance,
        minus_importance=-terms.importance,
    )
    return PolicyPeaks(*(jnp.where(used, value, -LARGEST).max() for value in values))


def _extremes(policy: PolicyLoss, acc: Accumulated) -> Metrics:
    """Zero where nothing is trained."""
    peaks = jax.tree.map(lambda peak: jnp.where(acc.sums.terms > 0, peak, 0.0), acc.peaks)
    metrics = {"sampling/sampling_logp_difference/max": peaks.mismatch}
    if policy.loss_type != "cispo":
        metrics |= {"clip_ratio/low_min": -peaks.minus_low, "clip_ratio/high_max": peaks.high}
    if policy.importance_sampling_mode is not None:
        metrics["sampling/importance_sampling_ratio/min"] = -peaks.minus_importance
        metrics["sampling/importance_sampling_ratio/max"] = peaks.importance
    return metrics


def _metrics(policy: PolicyLoss, sums: PolicySums) -> Metrics:
    terms, ratios, importances = (jnp.maximum(x, 1.0) for x in (sums.terms, sums.ratios, sums.importances))
    metrics = {
        "entropy": sums.entropy / terms,
        "num_terms": sums.terms,
        "kl": sums.kl / terms,
        "ratio": sums.ratio / ratios,
        "sampling/sampling_logp_difference/mean": sums.mismatch / terms,
    }
    if policy.loss_type == "cispo":
        metrics["cispo_clip_ratio"] = sums.high / ratios
    else:
        metrics["clip_ratio/low_mean"], metrics["clip_ratio/high_mean"] = sums.low / ratios, sums.high / ratios
        metrics["clip_ratio/region_mean"] = (sums.low + sums.high) / ratios
    if policy.importance_sampling_mode is not None:
        metrics["sampling/importance_sampling_ratio/mean"] = sums.importance / importances
    return metrics
