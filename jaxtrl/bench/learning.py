"""`python -m jaxtrl.bench learning`: does the default job of `python -m jaxtrl.grpo` learn?

The job runs once for each seed, as a user starts it, on one tiny model that is trained first. Of each run: the mean
reward of the first and of the last `--window` steps, and the reward on held-out prompts (other numbers than those of
the training prompts) before and after, by the trainer's own evaluation, which samples as training does. `--negate`
trains on minus the reward, and must lower it. What this command does not know goes to jaxtrl.grpo (`--max_steps=50`).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jaxtrl.grpo import TINY_SFT, tiny_sft_model
from jaxtrl.rollout.rewards import exact_match

FIRST_SEED = 42
MEASURES = ("first", "last", "gain", "held_out_before", "held_out_after", "seconds")


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m jaxtrl.bench learning", description=__doc__)
    out.add_argument("--seeds", type=int, default=5, help=f"runs, with seeds from {FIRST_SEED} on (default 5)")
    out.add_argument("--window", type=int, default=20, help="steps at each end that are compared (default 20)")
    out.add_argument("--negate", action="store_true", help="train on minus the reward")
    out.add_argument("--output_dir", help="where runs are kept, and a tiny model is looked for (default: nowhere)")
    out.add_argument("--compile_cache", default="auto", help="as in jaxtrl.grpo")
    return out


def negated_exact_match(**columns: Any) -> list[float | None]:
    """Minus `exact_match`."""
    return [None if reward is None else -reward for reward in exact_match(**columns)]


def main(argv: list[str]) -> int:
    command = parser()
    args, more = command.parse_known_args(argv)
    if min(args.seeds, args.window) < 1:
        command.error("--seeds and --window must be at least 1")
    try:
        with tempfile.TemporaryDirectory() as folder:
            result = run(args, more, Path(args.output_dir or folder).resolve())
    except (ValueError, OSError) as error:
        print(f"error: {error}", flush=True)
        return 1
    print(json.dumps(result))
    return 0


def run(args: argparse.Namespace, more: list[str], folder: Path) -> dict[str, Any]:
    """Rewards are those of exact_match, also where its negative is trained on; standard deviations are over seeds."""
    start = time.perf_counter()
    model = tiny_sft_model(folder / TINY_SFT, SimpleNamespace(compile_cache=args.compile_cache))
    result: dict[str, Any] = {"negated": args.negate, "window": args.window}
    result["sft_seconds"] = time.perf_counter() - start
    flags = [f"--compile_cache={args.compile_cache}", *more]
    if args.negate:
        flags.append(f"--reward_funcs={__name__}.{negated_exact_match.__name__}")
    runs, curves = [], []
    for seed in range(FIRST_SEED, FIRST_SEED + args.seeds):
        measured, curve = measure(folder / f"seed_{seed}", model, [f"--seed={seed}", *flags], args)
        runs.append({"seed": seed, **measured})
        curves.append(curve)
        print(
            "  ".join(f"{name} {value:.3f}" if name != "seed" else f"seed {value}" for name, value in runs[-1].items())
        )
    result["runs"] = runs
    for name in MEASURES:
        result[name] = spread([one[name] for one in runs])
    result["curve"] = {step: spread([curve[step] for curve in curves]) for step in curves[0]}
    return {**result, "load": os.getloadavg()[0]}


def spread(values: list[float]) -> dict[str, float]:
    """Mean and standard deviation."""
    return {"mean": statistics.fmean(values), "std": statistics.stdev(values) if len(values) > 1 else 0.0}


def measure(
    folder: Path, model: Path, flags: list[str], args: argparse.Namespace
) -> tuple[dict[str, float], dict[int, float]]:
    """One run of the job in a process of its own, which finds its tiny model trained, and its reward at each log."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / TINY_SFT).exists():
        (folder / TINY_SFT).symlink_to(model, target_is_directory=True)
    command = [sys.executable, "-m", "jaxtrl.grpo", f"--output_dir={folder}", *flags]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise ValueError(f"{' '.join(command[1:])} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    sign = -1.0 if args.negate else 1.0
    return {**rewards(lines, args.window, sign), "seconds": seconds}, curve(lines, sign)


def curve(lines: list[dict[str, Any]], sign: float) -> dict[int, float]:
    """The reward of training by step, as `metrics.jsonl` says it."""
    return {line["step"]: sign * line["reward"] for line in lines if "reward" in line}


def rewards(lines: list[dict[str, Any]], window: int, sign: float) -> dict[str, float]:
    """What `metrics.jsonl` says of the first and last `window` steps and of the first and last evaluation."""
    trained = curve(lines, sign)
    held_out = [sign * line["eval_reward"] for line in lines if "eval_reward" in line]
    if not trained or not held_out or min(trained) > window:
        raise ValueError("the run logs no reward within --window steps, or none of an evaluation: leave these on")
    first = statistics.fmean(reward for step, reward in trained.items() if step <= window)
    last = statistics.fmean(reward for step, reward in trained.items() if step > max(trained) - window)
    ends = {"held_out_before": held_out[0], "held_out_after": held_out[-1]}
    return {"first": first, "last": last, "gain": last - first, **ends}
