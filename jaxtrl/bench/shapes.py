"""`python -m jaxtrl.bench shapes`: time to the end of a run under each kind of shape set, compiling included.

Programs and padding are those of the plan; a compile costs `--seconds_per_compile` (the default, 60, is Neuron's). Step
seconds are measured here on some classes of the shape set `auto`, and carried over to the classes of the others by the
line through (counted FLOPs, seconds) that fits them best. Packed rows are compared after the same share of the data.
"""

import argparse
import json
import statistics
import tempfile
import time
from typing import Any

import jax
import numpy as np

from jaxtrl.hardware.compile_cache import enable_compile_cache
from jaxtrl.hardware.memory import keep_freed_memory
from jaxtrl.model.qwen3 import init_params
from jaxtrl.planning.costs import EFFICIENCY, Rates
from jaxtrl.planning.make import PlannedRun, compare, find_config, plain_lines, prepare
from jaxtrl.planning.shapes import Setting, ShapeCost, at_share, shape_cost
from jaxtrl.rows.batch import ShapeClass
from jaxtrl.trainers.sft_config import SFTConfig
from jaxtrl.trainers.sft_data import data_seed, is_shuffled

MARKS = (20, 500)
COUNTED = Rates(0.0, None, "", 1 / EFFICIENCY, "one FLOP a second")  # "seconds" are then FLOPs


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m jaxtrl.bench shapes", description=__doc__)
    out.add_argument("--model", required=True, help="folder of a Hugging Face Qwen3 checkpoint with its tokenizer")
    out.add_argument("--data", required=True, help="file in any format that SFT takes")
    out.add_argument("--batch", type=int, default=4, help="sequences a step (default 4)")
    out.add_argument("--max_length", type=int, default=2048, help="tokens of a sequence at most (default 2048)")
    out.add_argument("--steps", type=int, default=500, help="optimizer steps (default 500)")
    out.add_argument("--seconds_per_compile", type=float, default=60.0, help="of each program (default 60)")
    out.add_argument("--classes", type=int, default=4, help="classes whose steps are timed (default 4)")
    out.add_argument("--repeats", type=int, default=3, help="timed steps of each (default 3)")
    out.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    return out


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    if jax.default_backend() == "cpu":
        keep_freed_memory()
    enable_compile_cache("off")
    with tempfile.TemporaryDirectory() as folder:
        result = measure(args, folder)
    for setting in result["settings"]:
        times = ", ".join(f"{minutes:.1f} min to step {mark}" for mark, minutes in setting["minutes"].items())
        print(
            f"{setting['name']:14} {setting['programs']:>4} programs, {100 * setting['padding_share']:.1f} %: {times}"
        )
    if args.json:
        print(json.dumps(result))
    return 0


def measure(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """The keys of the result are those of the last line under `--json`."""
    options = SFTConfig(
        output_dir=folder,
        model_name_or_path=args.model,
        per_device_train_batch_size=args.batch,
        max_length=args.max_length,
        max_steps=args.steps,
    )
    config, tokenizer = find_config(options)
    run = prepare(options, config, tokenizer, args.data)
    skips_lanes = jax.default_backend() == "cpu"
    costs = [
        shape_cost(setting, config, COUNTED, run.remat, skips_lanes) for setting in compare(run, plain_lines(run)[0])
    ]
    timed = time_classes(run, costs[0].setting, args.classes, args.repeats, skips_lanes)
    flops, seconds = np.array(timed).T
    slope, base = np.polyfit(flops, seconds, 1)
    return {
        "settings": [_time_to_end(cost, args, run.extent.steps, slope, max(base, 0.0)) for cost in costs],
        "seconds_per_compile": args.seconds_per_compile,
        "timed": [{"flops": flops, "seconds": seconds} for flops, seconds in timed],
        "seconds_per_tflop": slope * 1e12,
        "seconds_per_step": base,
    }


def _time_to_end(cost: ShapeCost, args: argparse.Namespace, steps: int, slope: float, base: float) -> dict[str, Any]:
    measured = cost._replace(step_seconds=slope * cost.step_seconds + base)
    rates = COUNTED._replace(compile_low=args.seconds_per_compile)
    seconds = at_share(measured, rates, steps)
    marks = sorted({min(mark, steps) for mark in (*MARKS, steps)})
    return {
        "name": cost.setting.name,
        "programs": int(cost.programs[-1]),
        "padding_share": cost.padding,
        "minutes": {str(mark): float(seconds[mark - 1]) / 60 for mark in marks},
    }


def time_classes(
    run: PlannedRun, setting: Setting, classes: int, repeats: int, skips_lanes: bool
) -> list[tuple[float, float]]:
    """(counted FLOPs, median seconds) of a train step on batches of some classes of the setting, small to large."""
    batches, steps = setting.batches, run.steps
    first: dict[ShapeClass, int] = {}
    for number, need in enumerate(setting.run.needs.each()):
        first.setdefault(batches.shapes.class_of(need), number)
    order = sorted(first)
    chosen = [order[i] for i in sorted({round(x) for x in np.linspace(0, len(order) - 1, classes)})]
    micros = _build(run, setting, {first[shape] for shape in chosen})
    state = steps.create_state(init_params(run.config, 0))
    cost = shape_cost(setting, run.config, COUNTED, run.remat, skips_lanes)
    timed = []
    for number in sorted(micros):
        seconds = []
        for _ in range(repeats + 1):  # the first compiles
            start = time.perf_counter()
            state, _ = jax.block_until_ready(steps.train(state, [micros[number]]))
            seconds.append(time.perf_counter() - start)
        timed.append((float(cost.step_seconds[number]), statistics.median(seconds[1:])))
    return timed


def _build(run: PlannedRun, setting: Setting, numbers: set[int]) -> dict[int, Any]:
    """The micro-batches with these numbers; each is a step."""
    found: dict[int, Any] = {}
    count, sizes = setting.batches.lines.count, setting.extent.sizes
    assert count is not None
    for number in sorted(numbers):
        start = sizes.position(number, count)
        (micro,), _ = next(setting.batches.epoch_steps(sizes, start, data_seed(run.args), is_shuffled(run.args)))
        found[number] = micro
    return found
