"""From rewards to the term columns of GRPO: advantages, and what each loss type divides by (NumPy only).

The device program computes sum(weight * l) / sum(denominator) over all rows of an optimizer step, for every loss type.
What distinguishes "grpo", "dr_grpo" and "dapo" is therefore said here, by each row's `weight` and `denominator`.
"""

import numpy as np
from jaxtyping import Float, Float32

from .batch import Row

EPSILON = 1e-4  # TRL's: keeps rounding errors of equal rewards from becoming advantages
SCALES = ("group", "batch", "none")
LOSS_TYPES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo")


def group_advantages(rewards: Float[np.ndarray, "*groups size"], scale: str = "group") -> Float32[np.ndarray, "..."]:
    """How much better each completion is than the mean of its group (the last axis): [*groups, size].

    Divided by the standard deviation (n - 1, plus 1e-4) of the group, of the whole array ("batch", which is then the
    whole step), or not at all ("none"): https://arxiv.org/abs/2402.03300, https://arxiv.org/abs/2503.20783. A NaN is a
    completion without a reward: no mean or deviation counts it, and its advantage is 0. Groups with equal rewards or
    with a single one give exactly 0. Computed in float64. Raises ValueError for another `scale` or infinite rewards.
    """
    if scale not in SCALES:
        raise ValueError(f"scale_rewards is {scale!r}: use one of {', '.join(SCALES)}")
    values = np.asarray(rewards, np.float64)
    if np.isinf(values).any():
        raise ValueError("a reward is infinite: reward functions give finite numbers, or None for no reward")
    known = ~np.isnan(values)
    count = known.sum(-1, keepdims=True)
    filled = np.where(known, values, 0.0)
    centred = np.where(known, values - filled.sum(-1, keepdims=True) / np.maximum(count, 1), 0.0)
    highest, lowest = (
        pick(np.where(known, values, empty), axis=-1, keepdims=True)
        for pick, empty in ((np.max, -np.inf), (np.min, np.inf))
    )
    centred = np.where(highest > lowest, centred, 0.0)
    if scale == "group":
        centred = centred / (np.sqrt((centred**2).sum(-1, keepdims=True) / np.maximum(count - 1, 1)) + EPSILON)
    elif scale == "batch":
        centred = centred / ((values[known].std(ddof=1) if known.sum() > 1 else 0.0) + EPSILON)
    return centred.astype(np.float32)


def normalise_row(row: Row, loss_type: str, max_completion_length: int | None = None, untrained: int = 0) -> Row:
    """The row with the `weight` of its terms and the `denominator` that it adds to the step's, for one loss type.

    "dapo" (https://arxiv.org/abs/2503.14476) is the mean over all trained tokens of the step, and so are "cispo"
    (https://arxiv.org/abs/2506.13585) and "bnpo", which in TRL takes a mean of each micro-batch's means instead.
    "grpo" (https://arxiv.org/abs/2402.03300) is the mean over completions of the mean over a completion's tokens.
    "dr_grpo" (https://arxiv.org/abs/2503.20783) is the sum over tokens divided by completions times
    `max_completion_length`. `untrained` completions have no term in the row (mask_truncated_completions) but count as
    completions, as in TRL; trained tokens are counted over the others only.

    Raises ValueError for another loss type and for "dr_grpo" without `max_completion_length`.
    """
    check_loss_type(loss_type)
    samples, own, lengths = np.unique(row.term_sample, return_inverse=True, return_counts=True)
    completions = len(samples) + untrained
    weight = np.ones(len(own), np.float32)
    if loss_type == "grpo":
        return row._replace(weight=(1.0 / lengths[own]).astype(np.float32), denominator=float(completions))
    if loss_type == "dr_grpo":
        if max_completion_length is None or max_completion_length < 1:
            raise ValueError(f'loss_type "dr_grpo" divides by max_completion_length, which is {max_completion_length}')
        return row._replace(weight=weight, denominator=float(completions * max_completion_length))
    return row._replace(weight=weight, denominator=float(len(own)))


def check_loss_type(loss_type: str) -> None:
    """Raises ValueError for a loss type that there is not."""
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"loss_type is {loss_type!r}: use one of {', '.join(LOSS_TYPES)}")
