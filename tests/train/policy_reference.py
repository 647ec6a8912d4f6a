"""GRPO's losses in NumPy, float64, one completion after the other; derivatives by differences."""

from typing import Any

import numpy as np

from jaxtrl.rows.batch import Sample


def token_losses(
    logp: np.ndarray, sample: Sample, options: dict[str, Any], constant: np.ndarray | None = None
) -> tuple[np.ndarray, dict[str, Any]]:
    """The losses of one completion's tokens in float64, and what is reported about them, as the papers write them.

    `constant` are the ratios where the loss takes them as constant (cispo).
    """
    trained = sample.loss_mask.nonzero()[0]
    old, ref, sampler = (np.float64(x[trained]) for x in (sample.old_logp, sample.ref_logp, sample.sampler_logp))
    advantage, low, high = np.float64(sample.advantage), 0.2, options.get("epsilon_high") or 0.2
    sequence = options.get("importance_sampling_level") == "sequence"
    ratio = np.exp(logp - old)
    if sequence:
        ratio = np.full(len(logp), np.prod(ratio) ** (1 / len(ratio)))
    report = {"ratio": ratio, "mismatch": np.abs(logp - sampler), "low": (ratio < 1 - low) & (advantage < 0)}
    report["high"] = (ratio > 1 + high) & (advantage > 0)
    if options.get("loss_type") == "cispo":
        report |= {"high": (ratio > high) & (advantage > 0), "low": np.zeros(len(ratio), bool)}
        loss = -np.minimum(ratio if constant is None else constant, high) * advantage * logp
    else:
        first = np.minimum(ratio, options.get("delta") or np.inf)
        loss = -np.minimum(first * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)
    if options.get("importance_sampling_mode"):
        factor = np.full(len(old), np.exp((old - sampler).sum()))
        if options["importance_sampling_mode"].startswith("token"):
            factor = np.exp(old - sampler)
        cap = options.get("importance_sampling_clip_max", 3.0)
        is_mask = options["importance_sampling_mode"].endswith("mask")
        report["importance"] = np.where(factor > cap, 0.0 if is_mask else cap, factor)
        loss = loss * report["importance"]
    kl = np.exp(logp - old) - 1 - (logp - old)
    if options.get("beta"):
        kl = np.exp(ref - logp) - 1 - (ref - logp)
        loss = loss + options["beta"] * kl * (ratio if options.get("use_bias_correction_kl", True) else 1)
    return loss, report | {"kl": kl}


def reduce(losses: list[np.ndarray], loss_type: str, longest: int) -> float:
    """The loss of a step from all its token losses, as each loss type's paper writes it."""
    if loss_type == "grpo":
        return float(np.mean([x.mean() for x in losses]))
    if loss_type == "dr_grpo":
        return float(np.mean([x.sum() / longest for x in losses]))
    return float(np.concatenate(losses).mean())


def step_loss(
    logps: list[np.ndarray], samples: list[Sample], options: dict[str, Any], longest: int
) -> tuple[float, list[np.ndarray], list[dict[str, Any]]]:
    """The loss of a step, its derivatives by every log-prob (differences of 1e-5), and each completion's reports."""
    ratios = [token_losses(x, s, options)[1]["ratio"] for x, s in zip(logps, samples, strict=True)]

    def total(changed: list[np.ndarray]) -> float:
        losses = [token_losses(x, s, options, r)[0] for x, s, r in zip(changed, samples, ratios, strict=True)]
        return reduce(losses, options.get("loss_type", "dapo"), longest)

    slopes = []
    for number, logp in enumerate(logps):
        slope = np.zeros(len(logp))
        for i in range(len(logp)):
            ends = []
            for step in (1e-5, -1e-5):
                moved = logp.copy()
                moved[i] += step
                ends.append(total([*logps[:number], moved, *logps[number + 1 :]]))
            slope[i] = (ends[0] - ends[1]) / 2e-5
        slopes.append(slope)
    return total(logps), slopes, [token_losses(x, s, options)[1] for x, s in zip(logps, samples, strict=True)]


def mean_reports(reports: list[dict[str, Any]], options: dict[str, Any]) -> dict[str, float]:
    """Means over tokens, or over completions of what each completion has one of."""
    mode = options.get("importance_sampling_mode") or ""
    single = {"importance"} if mode.startswith("sequence") else set()
    if options.get("importance_sampling_level") == "sequence":
        single |= {"ratio", "low", "high"}
    return {
        name: float(np.concatenate([np.float64(r[name])[: 1 if name in single else None] for r in reports]).mean())
        for name in reports[0]
    }
