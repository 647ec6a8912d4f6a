"""Policy-gradient losses over the terms of a row: GRPO and its relatives (DESIGN.md section 6).

Everything here is a function of single terms, one for each trained token of each completion, except what is summed over
the terms of one completion. How terms are weighed against each other (per token, per completion, Dr. GRPO) is not known
here: it is in the columns `weight` and `denominator` (rows/advantages.py).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxtrl.rows.advantages import check_loss_type
from jaxtrl.train.losses import sum_by_sample

LEVELS = ("token", "sequence")
LARGEST = float(jnp.finfo(jnp.float32).max)
CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def clipped(
    ratio: Float[Array, "t"],
    advantage: Float[Array, "t"],
    epsilon: float,
    epsilon_high: float,
    delta: float | None = None,
) -> Float[Array, "t"]:
    """-min(ratio A, clip(ratio, 1 - epsilon, 1 + epsilon_high) A), A being the advantage.

    PPO's objective (https://arxiv.org/abs/1707.06347) as GRPO uses it (https://arxiv.org/abs/2402.03300), with an upper
    bound of its own (DAPO, https://arxiv.org/abs/2503.14476). With `delta` the first ratio is at most that, which
    bounds the loss where A is negative (INTELLECT-2, https://arxiv.org/abs/2505.07291).
    """
    bounded = ratio if delta is None else jnp.minimum(ratio, delta)
    return -jnp.minimum(bounded * advantage, jnp.clip(ratio, 1 - epsilon, 1 + epsilon_high) * advantage)


def cispo(
    ratio: Float[Array, "t"], advantage: Float[Array, "t"], logp: Float[Array, "t"], epsilon_high: float
) -> Float[Array, "t"]:
    """-min(ratio, epsilon_high) A log p with the ratio taken as constant, so that no token loses its gradient.

    MiniMax-M1, https://arxiv.org/abs/2506.13585; the largest ratio as in ScaleRL, https://arxiv.org/abs/2510.13786.
    """
    return -lax.stop_gradient(jnp.minimum(ratio, epsilon_high)) * advantage * logp


def k3(logp: Float[Array, "t"], other: Float[Array, "t"]) -> Float[Array, "t"]:
    """q / p - log(q / p) - 1, whose mean over samples of p is KL(p || q) (http://joschu.net/blog/kl-approx.html)."""
    return jnp.exp(other - logp) - (other - logp) - 1


class Evaluated(NamedTuple):
    """Of each term: its loss, and what is reported about it. Entries of unused terms mean nothing.

    A share is 1, or 1 / tokens of the completion where there is one such number for each completion.
    """

    loss: Float[Array, "t"]
    ratio: Float[Array, "t"]
    ratio_share: Float[Array, "t"]
    low: Float[Array, "t"]  # 1 where the lower bound of the ratio takes the gradient away, else 0
    high: Float[Array, "t"]
    kl: Float[Array, "t"]
    mismatch: Float[Array, "t"]  # |logp - sampler_logp|
    importance: Float[Array, "t"]  # the factor that corrects between sampler and trainer
    importance_share: Float[Array, "t"]


@dataclass(frozen=True)
class PolicyLoss:
    """A loss on terms. Names, defaults and meanings of the fields are those of TRL's GRPOConfig.

    `importance_sampling_level` "sequence" is GSPO (https://arxiv.org/abs/2507.18071): one ratio for a completion, the
    geometric mean of its tokens'. `beta` weighs the KL divergence (k3) from the reference, which
    `use_bias_correction_kl` multiplies by the ratio (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556).
    `importance_sampling_mode` (TRL's vllm_importance_sampling_mode) corrects for the distance between sampler and
    trainer (https://fengyao.notion.site/off-policy-rl): the policy loss is multiplied by exp(old_logp - sampler_logp),
    of the token or of the whole completion (the product over its tokens), clipped to [clip_min, clip_max] ("truncate")
    or 0 outside of it ("mask").

    Raises ValueError for unknown names and for values that cannot work.
    """

    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    importance_sampling_mode: str | None = None
    importance_sampling_clip_max: float | None = 3.0
    importance_sampling_clip_min: float | None = None

    def __post_init__(self):
        check_loss_type(self.loss_type)
        _check_one_of("importance_sampling_level", self.importance_sampling_level, LEVELS)
        if self.importance_sampling_mode is not None:
            _check_one_of("importance_sampling_mode", self.importance_sampling_mode, CORRECTIONS)
            low, high = self.importance_sampling_clip_min, self.importance_sampling_clip_max
            _check_bounds(self.importance_sampling_mode, low, high)
        if not 0 <= self.epsilon < 1:
            raise ValueError(f"epsilon is {self.epsilon}: the ratio's lower bound is 1 - epsilon, so give 0 to 1")
        for name in ("epsilon_high", "delta", "beta"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{name} is {value}: give a finite number from 0 on")
        if self.loss_type == "cispo" and (self.epsilon_high is None or self.delta is not None):
            raise ValueError(
                'loss_type "cispo" bounds the ratio by epsilon_high alone: set it (5.0 is usual) and leave delta out'
            )

    def missing_columns(self, batch: Any) -> list[str]:
        """The columns that this loss needs and `batch` (of rows or one row) does not have."""
        needed = {"advantage": True, "old_logp": True, "ref_logp": self.beta > 0}
        needed["sampler_logp"] = self.importance_sampling_mode is not None
        return [name for name, is_needed in needed.items() if is_needed and getattr(batch, name) is None]

    def evaluate(self, logp: Float[Array, "t"], row: Any) -> Evaluated:
        """The terms of one row with these log-probs, by which the loss is differentiable.

        `kl` is the divergence from the reference or, without one, from the policy that sampled, as TRL's two trainers
        report it. Without a column `sampler_logp` the old log-probs are taken as the sampler's.
        """
        used = row.weight != 0
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        share = 1.0 / jnp.maximum(sum_by_sample(used.astype(jnp.float32), row.term_sample), 1.0)
        one = jnp.ones_like(share)
        log_token = jnp.where(used, logp - row.old_logp, 0.0)
        per_sequence = self.importance_sampling_level == "sequence"
        ratio = jnp.exp(share * sum_by_sample(log_token, row.term_sample) if per_sequence else log_token)
        if self.loss_type == "cispo":
            loss, is_low = cispo(ratio, row.advantage, logp, high), jnp.zeros_like(used)
            is_high = (ratio > high) & (row.advantage > 0)
        else:
            loss = clipped(ratio, row.advantage, self.epsilon, high, self.delta)
            is_low = (ratio < 1 - self.epsilon) & (row.advantage < 0)
            is_high = (ratio > 1 + high) & (row.advantage > 0)
        sampler_logp = row.old_logp if row.sampler_logp is None else row.sampler_logp
        importance = self._importance(jnp.where(used, row.old_logp - sampler_logp, 0.0), row.term_sample)
        loss = loss * importance
        if self.beta > 0:
            kl = k3(logp, jnp.where(used, row.ref_logp, logp))
            loss = loss + self.beta * (kl * ratio if self.use_bias_correction_kl else kl)
        else:
            kl = jnp.exp(log_token) - log_token - 1
        return Evaluated(
            loss=loss,
            ratio=ratio,
            ratio_share=share if per_sequence else one,
            low=is_low.astype(jnp.float32),
            high=is_high.astype(jnp.float32),
            kl=kl,
            mismatch=jnp.abs(logp - sampler_logp),
            importance=importance,
            importance_share=share if self.corrects_sequences else one,
        )

    @property
    def is_per_term(self) -> bool:
        """Whether a term's loss depends on no other term's log-prob."""
        return self.importance_sampling_level == "token"

    @property
    def corrects_sequences(self) -> bool:
        """Whether the importance correction is one factor for a whole completion."""
        return self.importance_sampling_mode is not None and self.importance_sampling_mode.startswith("sequence")

    def _importance(self, difference: Float[Array, "t"], term_sample: Int[Array, "t"]) -> Float[Array, "t"]:
        """The factor of each term from log-prob differences old - sampler."""
        if self.importance_sampling_mode is None:
            return jnp.ones_like(difference)
        factor = jnp.exp(sum_by_sample(difference, term_sample) if self.corrects_sequences else difference)
        low = 0.0 if self.importance_sampling_clip_min is None else self.importance_sampling_clip_min
        high = LARGEST if self.importance_sampling_clip_max is None else self.importance_sampling_clip_max
        if self.importance_sampling_mode.endswith("truncate"):
            return jnp.clip(factor, low, high)
        return jnp.where((factor < low) | (factor > high), 0.0, factor)


def _check_one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} is {value!r}: use one of {', '.join(known)}")


def _check_bounds(mode: str, low: float | None, high: float | None) -> None:
    if (low is not None and low < 0) or (high is not None and high <= (low or 0)):
        raise ValueError(f"importance_sampling_clip_min {low} must be at least 0 and below clip_max {high}")
    if low is None and high is None:
        raise ValueError(f"importance_sampling_mode {mode!r} needs importance_sampling_clip_min or clip_max")
