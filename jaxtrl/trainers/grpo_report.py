"""What is said before and during a run of GRPO."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from rich.table import Table
from rich.text import Text

from jaxtrl.model.config import Qwen3Config
from jaxtrl.rows.batch import ShapeClass
from jaxtrl.trainers import report
from jaxtrl.trainers.grpo_batches import Scored
from jaxtrl.trainers.grpo_config import AsyncGRPOConfig
from jaxtrl.trainers.logging import Display

COLUMNS = (
    "reward",
    "reward_std",
    "loss",
    "completions/mean_length",
    "sample/staleness_mean",
    "tokens_per_second",
    "packing_ratio",
)
MOST_TOKENS = 200


def introduction(
    config: Qwen3Config,
    args: AsyncGRPOConfig,
    dtype: np.dtype,
    data: Mapping[str, str],
    rewards: Sequence[str],
    shape: ShapeClass,
    steps_and_groups: tuple[int, int],
    cache: str,
    devices: int,
) -> str:
    """Aligned `name  value` lines: model, devices, prompts, rewards, rows, steps, and where things are kept."""
    lines = report.model_lines(config, args, dtype, devices)
    lines |= dict(data)
    lines["rewards"] = ", ".join(rewards)
    kinds = {"workers": "worker processes", "ray": "Ray actors"}
    where = f"{args.rollout_workers} {kinds[args.rollout]}" if args.rollout in kinds else args.rollout
    lines["rollout"] = f"{where}, weights at most {args.max_staleness} steps older than what is trained"
    lines["shapes"] = f"rows of {shape.tokens:,} tokens and {shape.slots:,} head slots"
    steps, groups = steps_and_groups
    lines["steps"] = f"{steps:,}, each on {groups} groups of {args.num_generations} completions"
    lines["output"], lines["compile cache"] = str(args.output_dir), cache
    return report.aligned(lines)


def print_completions(
    display: Display,
    scored: Scored,
    decode: Callable[[list[int]], str],
    names: Sequence[str],
    step: int,
    most: int | None = None,
) -> None:
    """A table of prompts, completions, rewards and advantages: all of the groups, or evenly chosen `most` of them."""
    table = Table(title=f"step {step}", show_lines=True)
    for title in ("prompt", "completion", *names, "advantage"):
        table.add_column(title, overflow="fold")
    entries = [
        (group, i, float(advantages[i]))
        for group, advantages in zip(scored.groups, scored.advantages, strict=True)
        for i in range(len(group.completions))
    ]
    count = len(entries) if most is None else min(most, len(entries))
    for index in np.linspace(0, len(entries) - 1, count).round().astype(int).tolist():
        group, i, advantage = entries[index]
        rewards = ["none" if np.isnan(reward) else f"{reward:.3g}" for reward in group.rewards[i]]
        table.add_row(*map(Text, [decode(group.prompt_ids), group.texts[i], *rewards, f"{advantage:.3g}"]))
    display.draw(table)
