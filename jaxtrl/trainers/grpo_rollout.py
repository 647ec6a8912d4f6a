"""Which rollout the options of AsyncGRPOConfig ask for, and which reward functions it calls."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from transformers import PreTrainedTokenizerBase

from jaxtrl.model.config import Qwen3Config
from jaxtrl.rollout.groups import RewardFunction, Rollout
from jaxtrl.rollout.inline import InlineRollout
from jaxtrl.rollout.pacing import Pacing
from jaxtrl.rollout.places import Place, worker_places
from jaxtrl.rollout.producer import RolloutSetup, plain_tokenizer
from jaxtrl.rollout.rewards import find_reward
from jaxtrl.rollout.sampler import stop_ids
from jaxtrl.rollout.scoring import function_name
from jaxtrl.rollout.workers import LocalWorkers
from jaxtrl.trainers.grpo_config import AsyncGRPOConfig
from jaxtrl.trainers.grpo_data import PromptData
from jaxtrl.trainers.grpo_processes import SharedRollout

RewardArgument = RewardFunction | str | list[RewardFunction | str]
SEED_STEP = 1_000_003
LEAST_SLOTS, MOST_SLOTS = 8, 64


def make_pacing(args: AsyncGRPOConfig, groups_per_step: int, total_groups: int) -> Pacing:
    """Raises ValueError, naming the option, for a queue or a staleness that would wait for ever."""
    processes = jax.process_count()
    return Pacing(
        groups_per_step // processes,
        total_groups // processes,
        args.max_staleness,
        args.num_iterations,
        args.weight_sync_steps,
        args.queue_maxsize // args.num_generations,
    )


def make_setup(
    args: AsyncGRPOConfig,
    config: Qwen3Config,
    tokenizer: PreTrainedTokenizerBase,
    source: Path | None,
    reward_funcs: Sequence[RewardFunction],
    longest_prompt: int,
    groups_per_step: int,
    dtype: str,
) -> RolloutSetup:
    """How groups are sampled and scored. `source`: the folder of the model, whose generation_config.json says more ids
    that end a completion than the tokenizer's."""
    workers = 1 if args.rollout == "inline" else args.rollout_workers
    slots = -(-groups_per_step * args.num_generations // (workers * jax.process_count()))
    ends = {*stop_ids(None, source, config)}
    if tokenizer.eos_token_id is not None:
        ends.add(tokenizer.eos_token_id)
    return RolloutSetup(
        config=config,
        reward_funcs=tuple(reward_funcs),
        tokenizer=plain_tokenizer(tokenizer),
        params=args.sampling_params(),
        max_length=longest_prompt + args.max_completion_length,
        num_generations=args.num_generations,
        slots=args.rollout_slots or min(max(slots, LEAST_SLOTS), MOST_SLOTS),
        dtype=dtype,
        eos_token_id=sorted(ends),
        seed=(args.seed + SEED_STEP * jax.process_index()) % 2**32,  # groups of different processes share numbers
        order_seed=args.order_seed,
        max_inflight=None if args.max_inflight_tasks < 0 else args.max_inflight_tasks,
        compile_cache=args.compile_cache,
        donate=args.donate_buffers,
    )


def make_rollout(args: AsyncGRPOConfig, setup: RolloutSetup, pacing: Pacing, data: PromptData) -> Rollout:
    """What samples in this process, in others or in a cluster, not started yet.

    Several trainer processes have one each, for every so many-th prompt.
    """
    if (count := jax.process_count()) > 1:
        stripe = data._replace(prompts=data.prompts[jax.process_index() :: count])
        return SharedRollout(_make_own(args, setup, pacing, stripe))
    return _make_own(args, setup, pacing, data)


def _make_own(args: AsyncGRPOConfig, setup: RolloutSetup, pacing: Pacing, data: PromptData) -> Rollout:
    if args.rollout == "inline":
        return InlineRollout(setup, pacing, data.prompts, args.shuffles)
    if args.rollout == "ray":
        from jaxtrl.rollout.ray_workers import RayWorkers

        return RayWorkers(
            setup,
            pacing,
            data.prompts,
            args.shuffles,
            workers=args.rollout_workers,
            address=args.ray_address,
            heartbeat_stale_after_s=args.heartbeat_stale_after_s,
        )
    environments = args.worker_environments()
    if environments is None:
        places = worker_places(jax.default_backend(), args.rollout_workers, args.rollout_cores)
    else:
        places = [Place(environment) for environment in environments]
    return LocalWorkers(
        setup,
        pacing,
        data.prompts,
        args.shuffles,
        places=places,
        weights_folder=None if args.weights_folder is None else Path(args.weights_folder),
        heartbeat_stale_after_s=args.heartbeat_stale_after_s,
    )


def rename_metrics(metrics: dict[str, float], steps: float | int, num_generations: int) -> dict[str, Any]:
    """The gauges of a rollout since the last log, `steps` optimizer steps ago, under TRL's names where it has them."""
    metrics = dict(metrics)
    out = {
        "sample/rollout_queue_size": metrics.pop("rollout/queue_depth", 0.0) * num_generations,
        "sample/time_in_queue_s": metrics.pop("rollout/queue_seconds", 0.0),
        "perf/rollout_wait_s": metrics.pop("rollout/wait_seconds", 0.0) / max(steps, 1),
        "perf/weight_sync_s": metrics.pop("rollout/weight_sync_seconds", 0.0) / max(steps, 1),
    }
    return out | metrics


def reward_functions(given: RewardArgument | None) -> list[RewardFunction]:
    """Callables; raises ValueError where there are none, and for an unknown name."""
    some = given if isinstance(given, list | tuple) else [] if given is None else [given]
    if not some:
        raise ValueError("reward_funcs is missing: give a function, or the name of one such as exact_match.")
    return [find_reward(one) if isinstance(one, str) else one for one in some]


def unique_names(functions: list[RewardFunction]) -> list[str]:
    """A name for each function, numbered where several have the same."""
    names: list[str] = []
    for function in functions:
        name, number = function_name(function), 2
        base = name
        while name in names:
            name, number = f"{base}_{number}", number + 1
        names.append(name)
    return names


def check_weights(weights: list[float] | None, names: list[str]) -> list[float]:
    if weights is not None and len(weights) != len(names):
        raise ValueError(f"reward_weights: expected one for each of {', '.join(names)}, got {len(weights)} numbers.")
    return [1.0] * len(names) if weights is None else weights
