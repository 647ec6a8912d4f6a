"""What is said before and during a run of GRPO."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

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


def rewards_line(history: Sequence[Mapping[str, Any]]) -> str:
    """What a run has made of the reward, by its first and last logs: of training, and on held-out prompts."""
    names = {"reward": "reward of training", "eval_reward": "reward on evaluation prompts"}
    logged = {text: [entry[name] for entry in history if name in entry] for name, text in names.items()}
    return ", ".join(f"{text} {found[0]:.3f} -> {found[-1]:.3f}" for text, found in logged.items() if found)


def completions_table(
    scored: Scored, decode: Callable[[list[int]], str], names: Sequence[str], step: int
) -> dict[str, list[Any]]:
    """Columns step, prompt, completion, the reward functions' (None where they gave none) and advantage, with an entry
    for each completion of the groups: what TRL sends to trackers."""
    entries = [
        (group, i, float(advantages[i]))
        for group, advantages in zip(scored.groups, scored.advantages, strict=True)
        for i in range(len(group.completions))
    ]
    rewards = {
        name: [None if np.isnan(group.rewards[i, f]) else float(group.rewards[i, f]) for group, i, _ in entries]
        for f, name in enumerate(names)
    }
    return {
        "step": [str(step)] * len(entries),
        "prompt": [decode(group.prompt_ids) for group, _, _ in entries],
        "completion": [group.texts[i] for group, i, _ in entries],
        **rewards,
        "advantage": [advantage for _, _, advantage in entries],
    }


def print_completions(display: Display, columns: Mapping[str, Sequence[Any]], most: int | None = None) -> None:
    """What `completions_table` gives: all of it, or evenly chosen `most` of its rows."""
    table = Table(title=f"step {columns['step'][0]}", show_lines=True)
    shown = [name for name in columns if name != "step"]
    for title in shown:
        table.add_column(title, overflow="fold")
    entries = list(zip(*(columns[name] for name in shown), strict=True))
    count = len(entries) if most is None else min(most, len(entries))
    for index in np.linspace(0, len(entries) - 1, count).round().astype(int).tolist():
        table.add_row(*(Text(_cell(value)) for value in entries[index]))
    display.draw(table)


def _cell(value: Any) -> str:
    return "none" if value is None else f"{value:.3g}" if isinstance(value, float) else value
