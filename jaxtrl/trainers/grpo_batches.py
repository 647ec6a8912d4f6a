"""From finished groups to the micro-batches of an optimizer step, and what is reported about them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Float32, Float64

from jaxtrl.rollout.groups import Group
from jaxtrl.rows.advantages import group_advantages, normalise_row
from jaxtrl.rows.batch import Row, Sample, ShapeClass, concat_rows, make_batch
from jaxtrl.rows.tree import tree_rows
from jaxtrl.train.distributed import sum_processes
from jaxtrl.train.mesh import own_rows, row_count
from jaxtrl.trainers.data import MicroBatch, count_pairs
from jaxtrl.trainers.grpo_config import AsyncGRPOConfig


class Scored(NamedTuple):
    """The groups of a batch with what each completion earned: [groups, size].

    `rewards` is the weighted sum over functions, NaN where none gave one and for completions that failed.
    """

    groups: list[Group]
    rewards: Float64[np.ndarray, "groups size"]
    advantages: Float32[np.ndarray, "groups size"]

    @property
    def failed(self) -> Bool[np.ndarray, "groups size"]:
        """Completions for which a reward function raised."""
        return np.stack([group.failed for group in self.groups])


def weigh_rewards(group: Group, weights: Sequence[float]) -> Float64[np.ndarray, " size"]:
    """The weighted sum of what the functions gave; None counts nothing, and all None or a failure give NaN."""
    rewards = group.rewards.astype(np.float64)
    total = np.nansum(rewards * np.asarray(weights), axis=1)
    return np.where(np.isnan(rewards).all(axis=1) | group.failed, np.nan, total)


def has_spread(rewards: Float64[np.ndarray, " size"]) -> bool:
    """Whether a group teaches anything: two of its rewards differ."""
    known = rewards[~np.isnan(rewards)]
    return bool(known.size and known.max() > known.min())


def score_groups(groups: list[Group], weights: Sequence[float], scale_rewards: str) -> Scored:
    rewards = np.stack([weigh_rewards(group, weights) for group in groups])
    return Scored(groups, rewards, group_advantages(rewards, scale_rewards))


def make_samples(scored: Scored, mask_truncated: bool) -> tuple[list[Sample], int]:
    """One sample per completion that is trained, with the ids and log-probs as sampled, and how many are masked.

    Completions that failed are neither. Entries of the log-prob columns at the prompt's tokens mean nothing.
    """
    samples, masked = [], 0
    for group, advantages in zip(scored.groups, scored.advantages, strict=True):
        prompt = np.asarray(group.prompt_ids, np.int32)
        for completion, failed, advantage in zip(group.completions, group.failed, advantages, strict=True):
            if failed:
                continue
            if mask_truncated and completion.finish_reason == "length":
                masked += 1
                continue
            logps = np.concatenate([np.zeros(len(prompt), np.float32), completion.logps])
            ids = np.concatenate([prompt, completion.token_ids])
            trained = np.arange(len(ids)) >= len(prompt)
            samples.append(
                Sample(ids, trained, float(advantage), old_logp=logps, sampler_logp=logps, group=group.number)
            )
    return samples, masked


def make_micro_batches(
    samples: list[Sample], masked: int, shape: ShapeClass, mesh: Mesh | None, args: AsyncGRPOConfig
) -> list[MicroBatch]:
    """Tree rows of all samples, one for each data-parallel device at a time; none of them where nothing is trained.

    Of several processes each makes the same plan, and batches of the rows of its own devices.
    """
    devices, own = row_count(mesh), own_rows(mesh)
    rows = tree_rows(samples, shape.tokens, max_slots=shape.slots, max_terms=shape.terms)
    rows = [
        normalise_row(row, args.loss_type, args.max_completion_length, untrained=0 if number else masked)
        for number, row in enumerate(rows)
    ]
    return [
        _micro_batch(rows[start + own.start : min(start + own.stop, len(rows))], shape, len(own), args.beta > 0)
        for start in range(0, len(rows), devices)
    ]


def _micro_batch(rows: list[Row], shape: ShapeClass, devices: int, has_reference: bool) -> MicroBatch:
    """One padded batch; `ref_logp`, where there is a reference, is filled in when the reference has scored it."""
    batch = make_batch([*rows, *[concat_rows([])] * (devices - len(rows))], shape)
    columns = ["advantage", "old_logp", "sampler_logp"] if not rows else []  # other processes' rows have them
    columns += ["ref_logp"] if has_reference else []
    zeros: dict[str, Any] = {name: np.zeros_like(batch.weight) for name in columns}
    batch = batch._replace(**zeros)
    return MicroBatch(
        shape,
        batch,
        tokens=sum(int(_sample_lengths(row).sum()) for row in rows),
        distinct=sum(len(row.input_ids) for row in rows),
        padded=devices * shape.tokens,
        slots=sum(len(row.slot_index) for row in rows),
        pairs=sum(count_pairs(row) for row in rows),
    )


def count_trained(micro_batches: Sequence[MicroBatch]) -> float:
    """Trained tokens of a step, in all processes."""
    own = sum(np.count_nonzero(micro.batch.weight) for micro in micro_batches)
    return float(sum_processes(np.array([own]))[0])


def _sample_lengths(row: Row) -> np.ndarray:
    """Tokens of each sample of the row: the position of its last trained token tells."""
    target = row.position_ids[row.slot_index[row.term_slot]] + 2
    lengths = np.zeros(int(row.term_sample.max(initial=-1)) + 1, np.int64)
    np.maximum.at(lengths, row.term_sample, target)
    return lengths


def group_metrics(scored: Scored, names: Sequence[str]) -> dict[str, float]:
    """Metrics of rewards and lengths under TRL's names; those that nothing is known about are left out."""
    rewards = np.concatenate([group.rewards for group in scored.groups]).astype(np.float64)
    out: dict[str, float] = {}
    out |= _mean_and_std("reward", "reward_std", scored.rewards.ravel())
    for column, name in enumerate(names):
        out |= _mean_and_std(f"rewards/{name}/mean", f"rewards/{name}/std", rewards[:, column])
    out["frac_reward_zero_std"] = float(np.mean([not has_spread(group) for group in scored.rewards]))
    completions = [completion for group in scored.groups for completion in group.completions]
    lengths = np.array([len(completion.token_ids) for completion in completions])
    stopped = np.array([completion.finish_reason != "length" for completion in completions])
    for kind, some in (("", lengths), ("terminated_", lengths[stopped])):
        if some.size:
            for name, function in (("mean", np.mean), ("min", np.min), ("max", np.max)):
                out[f"completions/{name}_{kind}length"] = float(function(some))
    out["completions/clipped_ratio"] = float(1 - stopped.mean())
    out["completions/failed_total"] = float(scored.failed.sum())
    return out


def _mean_and_std(mean: str, std: str, values: np.ndarray) -> dict[str, float]:
    known = values[~np.isnan(values)]
    if not known.size:
        return {}
    return {mean: float(known.mean()), std: float(known.std(ddof=1)) if known.size > 1 else 0.0}


def staleness_metrics(groups: Sequence[Group], step: int) -> dict[str, float]:
    """How many optimizer steps older the weights of each group's first token are than step `step` that trains it."""
    staleness = [step - group.first_version for group in groups]
    return {"sample/staleness_mean": float(np.mean(staleness)), "sample/staleness_max": float(max(staleness))}
