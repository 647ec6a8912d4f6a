"""`python -m jaxtrl.bench async`: does sampling beside training pay?

The same groups are trained twice, each time in fresh processes: with `rollout=inline`, held to one CPU core, and with a
trainer and one worker, each held to a core of its own. Completions have random lengths (the model is random, or never
ends), the reward is the share of even token ids. Measured are the optimizer steps in the middle of a run, all programs
being compiled, with as many groups ahead at the end as at the beginning. `training_share` is training's part of the
inline time: the two halves are about equal work where it is near 0.5; `--slots` and `--completion` move it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from transformers import TrainerCallback

WARM_STEPS, LAST_STEPS = 4, 4  # before and after those that are measured; more than max_staleness
MAX_STALENESS = 2


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m jaxtrl.bench async", description=__doc__)
    out.add_argument("--model", help="folder of a Qwen3 checkpoint with its tokenizer (default: the tiny random model)")
    out.add_argument("--steps", type=int, default=10, help="optimizer steps that are measured (default 10)")
    out.add_argument("--group", type=int, default=8, help="completions of a prompt (default 8)")
    out.add_argument("--batch", type=int, default=32, help="completions of a step (default 32)")
    out.add_argument("--completion", type=int, default=64, help="tokens of a completion at most (default 64)")
    out.add_argument("--tokens", type=int, default=1024, help="tokens of a row (default 1024)")
    out.add_argument("--slots", type=int, default=1, help="completions that are decoded together (default 1)")
    out.add_argument("--pairs", type=int, default=3, help="runs of both cells; the median counts (default 3)")
    out.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    out.add_argument("--cell", choices=("inline", "workers"), help=argparse.SUPPRESS)
    return out


def even_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The share of even token ids of each completion."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    if args.cell is not None:
        print(json.dumps(run_cell(args, args.cell)))
        return 0
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        print("bench async needs two CPU cores", file=sys.stderr)
        return 2
    pairs = [_pair(argv, args.steps, cores[0]) for _ in range(args.pairs)]
    result = {
        "ratio": statistics.median(pair["ratio"] for pair in pairs),
        "training_share": statistics.median(pair["training_share"] for pair in pairs),
        "pairs": pairs,
        "load": os.getloadavg()[0],
    }
    print(
        f"ratio {result['ratio']:.3f}, training is {result['training_share']:.0%} of the inline time "
        f"(medians of {len(pairs)} pairs)"
    )
    if args.json:
        print(json.dumps(result))
    return 0


def _pair(argv: list[str], steps: int, core: int) -> dict[str, Any]:
    """Both cells, one after the other."""
    cells = {name: _measure(argv, name, core) for name in ("inline", "workers")}
    for name, cell in cells.items():
        print(f"{name:8} {cell['seconds']:.2f} s for {steps} steps, of which {cell['wait_seconds']:.2f} s of waiting")
    inline, workers = cells["inline"], cells["workers"]
    return {
        "ratio": workers["seconds"] / inline["seconds"],
        "training_share": 1 - inline["wait_seconds"] / inline["seconds"],
        "cells": cells,
    }


def _measure(argv: list[str], cell: str, core: int) -> dict[str, Any]:
    """A cell in a process of its own, held to a core."""
    command = [sys.executable, "-m", "jaxtrl.bench", "async", *argv, "--cell", cell]
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})  # what is started now inherits it; a preexec_fn would fork beside JAX's threads
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    finally:
        os.sched_setaffinity(0, cores)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"the cell {cell} failed: {reason}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def run_cell(args: argparse.Namespace, rollout: str) -> dict[str, Any]:
    """Trains; seconds, and seconds of waiting for groups, are those of the measured steps."""
    from jaxtrl.assets import prompts_path
    from jaxtrl.hardware.memory import keep_freed_memory
    from jaxtrl.rows.sources import load_source
    from jaxtrl.trainers.grpo_config import AsyncGRPOConfig
    from jaxtrl.trainers.grpo_trainer import AsyncGRPOTrainer
    from jaxtrl.trainers.model_source import tiny_model

    keep_freed_memory()
    cores = sorted(set(range(os.cpu_count() or 1)) - os.sched_getaffinity(0))
    model, tokenizer = (args.model, None) if args.model else tiny_model(0)
    clock = _Clock(WARM_STEPS, WARM_STEPS + args.steps)
    with tempfile.TemporaryDirectory() as folder:
        config = AsyncGRPOConfig(
            output_dir=folder,
            rollout=rollout,
            rollout_cores=str(cores[0]) if rollout == "workers" else None,
            rollout_slots=args.slots,
            max_steps=WARM_STEPS + args.steps + LAST_STEPS,
            max_staleness=MAX_STALENESS,
            per_device_train_batch_size=args.batch,
            num_generations=args.group,
            max_completion_length=args.completion,
            token_budget=args.tokens,
            learning_rate=1e-5,
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
        )
        prompts = load_source(str(prompts_path()))
        trainer = AsyncGRPOTrainer(
            model, even_ids, config, train_dataset=prompts, processing_class=tokenizer, callbacks=[clock]
        )
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "perf/rollout_wait_s" in entry]
    measured = [entry for entry in logged if WARM_STEPS < entry["step"] <= WARM_STEPS + args.steps]
    return {
        "seconds": clock.end - clock.begin,
        "wait_seconds": sum(entry["perf/rollout_wait_s"] for entry in measured),
        "decode_seconds": sum(entry["rollout/decode_seconds"] for entry in measured),
        "sampled_tokens": sum(entry["rollout/sampled_tokens"] for entry in measured),
        "staleness": max(entry["sample/staleness_max"] for entry in measured),
    }


class _Clock(TrainerCallback):
    """When two steps ended."""

    def __init__(self, first: int, last: int):
        self.first, self.last = first, last
        self.begin = self.end = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.first:
            self.begin = time.perf_counter()
        if state.global_step == self.last:
            self.end = time.perf_counter()
