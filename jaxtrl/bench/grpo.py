"""`python -m jaxtrl.bench grpo`: the GRPO step on one group of completions, as a tree row and as a packed row.

Both rows hold the same completions of one random prompt; medians of alternating passes over `--repeats`, as in
`bench tree`. `speedup` and its limit are those of loss and gradient; `step_speedup` counts the optimizer's update too,
which takes either side the same time. The limit is the ratio of the counted FLOPs: three products in the head, four at
`--importance_sampling_level sequence`.
"""

import argparse
import math
from typing import Any

import jax
import numpy as np

from jaxtrl.bench.sft import DTYPES, update_seconds
from jaxtrl.bench.tree import add_measurement, compare, compile_side, finish, load_model, shared_prompt
from jaxtrl.hardware.memory import keep_freed_memory
from jaxtrl.rows.advantages import group_advantages, normalise_row
from jaxtrl.rows.batch import Sample, concat_rows
from jaxtrl.rows.tree import tree_row
from jaxtrl.train.grpo import make_grpo_step
from jaxtrl.train.optimizer import make_optimizer
from jaxtrl.train.policy import LEVELS
from jaxtrl.train.state import TrainState


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m jaxtrl.bench grpo", description=__doc__)
    out.add_argument("--group", type=int, default=8, help="completions of the prompt (default 8)")
    out.add_argument("--prompt", type=int, default=1024, help="tokens of the prompt (default 1024)")
    out.add_argument("--completion", type=int, default=128, help="tokens of each completion (default 128)")
    out.add_argument("--importance_sampling_level", choices=LEVELS, default="token", help="(default token)")
    add_measurement(out)
    return out


def group_samples(group: int, prompt: int, completion: int, vocab: int) -> list[Sample]:
    """Completions of one random prompt, with random rewards and the old log-probs of a uniform distribution."""
    samples = shared_prompt(group, prompt + completion, prompt / (prompt + completion), vocab)
    advantages = group_advantages(np.random.default_rng(1).normal(size=group)).tolist()
    old_logp = np.full(prompt + completion, -math.log(vocab), np.float32)
    return [s._replace(advantage=a, old_logp=old_logp) for s, a in zip(samples, advantages, strict=True)]


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures both sides; the keys of the result are those of the last line under `--json`."""
    if jax.default_backend() == "cpu":
        keep_freed_memory()
    config, params = load_model(args)
    samples = group_samples(args.group, args.prompt, args.completion, config.vocab_size)
    dtype, optimizer = DTYPES[args.dtype], make_optimizer(1e-6, 1)
    step = make_grpo_step(
        config, optimizer, importance_sampling_level=args.importance_sampling_level, dtype=dtype, donate=False
    )
    rows = [[normalise_row(row, "dapo")] for row in (concat_rows(samples), tree_row(samples))]
    products = 3 if args.importance_sampling_level == "token" else 4
    packed, tree = (
        side._replace(flops=side.flops._replace(head=side.flops.head * products / 3))
        for side in (compile_side(row, config, params, step, args.block_size) for row in rows)
    )
    result = compare(packed, tree, params, dtype, args.repeats)
    _, update = update_seconds(step, TrainState.create(params, optimizer), args.repeats)
    both = [result[f"{side}_seconds"] + update for side in ("packed", "tree")]
    return {"samples": len(samples), "update_seconds": update, "step_speedup": both[0] / both[1], **result}


def main(argv: list[str]) -> int:
    command = parser()
    args = command.parse_args(argv)
    if min(args.repeats, args.block_size or 1) < 1:
        command.error("--repeats and --block_size must be at least 1")
    try:
        result = run(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", flush=True)
        return 1
    print(
        f"{result['samples']} completions, {result['raw_tokens']} tokens as a packed row, "
        f"{result['unique_tokens']} as a tree row\nloss and gradient {result['packed_seconds']:.3f} s packed, "
        f"{result['tree_seconds']:.3f} s as a tree: "
        f"{result['speedup']:.2f} times faster, limit {result['limit']:.2f} "
        f"({100 * result['fraction_of_limit']:.0f} % of it); with the optimizer's {result['update_seconds']:.3f} s "
        f"{result['step_speedup']:.2f} times\nloss {result['packed_loss']:.6g} packed, "
        f"{result['tree_loss']:.6g} as a tree"
    )
    return finish(result, args.json)
