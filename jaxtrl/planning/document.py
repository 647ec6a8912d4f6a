"""plan.json: the two accounts of a plan, what they assume, and what the run needs of a device's memory."""

from collections import Counter
from typing import Any

import jax
import numpy as np

from jaxtrl.hardware.devices import describe_devices
from jaxtrl.planning.costs import EFFICIENCY, Rates
from jaxtrl.planning.make import PlannedRun, compare, group_numbers, plain_lines, tree_lines
from jaxtrl.planning.options import PlanConfig
from jaxtrl.planning.rates import find_matmul_rate, with_compile_seconds
from jaxtrl.planning.shapes import ShapeCost, describe, effort, recommend, shape_cost
from jaxtrl.planning.sharing import share_account
from jaxtrl.rows.blocks import DEFAULT_BLOCK_SIZE as BLOCK
from jaxtrl.rows.order import DataPosition
from jaxtrl.rows.tokenize import TokenizeReport
from jaxtrl.trainers.data import Lines, read_samples
from jaxtrl.trainers.fitting import GIB, Fit, fit_of
from jaxtrl.trainers.foresight import Foresight, foresee_run


def make_plan(run: PlannedRun, options: PlanConfig) -> dict[str, Any]:
    """The plan as JSON values; its keys are those of `KEYS`. Nothing is trained; a program is compiled for each
    compile_effort where `options` and the backend do not say what that takes, unless the run does not fit."""
    foresight = foresee_run(run.steps, run.batches, run.extent, run.args, DataPosition(), 0, scored=False)
    plain, report = plain_lines(run)
    settings = compare(run, plain)
    rates = Rates(0.0, None, "not needed: the run does not fit", *find_matmul_rate(options, run.steps.dtype))
    skips_lanes = jax.default_backend() == "cpu"
    costs = [shape_cost(setting, run.config, rates, run.remat, skips_lanes) for setting in settings]
    limit = None if options.device_memory_gib is None else int(options.device_memory_gib * GIB)
    fits = [fit_of(run.steps, cost.classes, limit) for cost in costs]
    if fits[0].is_possible:
        rates = with_compile_seconds(rates, options.seconds_per_compile, run, next(iter(costs[0].classes)))
    return {
        "devices": describe_devices(jax.devices()[: run.extent.sizes.devices]),
        "run": _run(run, foresight),
        "data": _data(run.report),
        "assumptions": _assumptions(run, rates, costs[0]),
        "shape_cost": _shape_cost(run, costs, rates, fits),
        "sharing": _sharing(run, plain, report, options),
        "memory": fits[0].to_json(),
    }


def _run(run: PlannedRun, foresight: Foresight) -> dict[str, Any]:
    assert foresight.training is not None
    return {
        "steps": run.extent.steps,
        "programs": dict(Counter(job.kind for job in foresight.jobs)),
        "padding_share": foresight.training.padding,
        "visited_over_needed": foresight.training.visits,
        "classes": [list(shape) for shape in foresight.training.shapes],
    }


def _data(report: TokenizeReport) -> dict[str, int]:
    return {
        "rows": report.rows,
        "dropped": report.rows - report.kept,
        **{name: getattr(report, name) for name in ("truncated", "tokens", "trained_tokens", "longest")},
    }


def _assumptions(run: PlannedRun, rates: Rates, own: ShapeCost) -> dict[str, Any]:
    tokens = int(own.setting.run.tokens.sum())
    return {
        "seconds_per_compile": rates.compile_low,
        "seconds_per_compile_high": rates.compile_high,
        "compile_source": rates.compile_source,
        "matmul_flops": rates.matmul,
        "matmul_source": rates.matmul_source,
        "efficiency": EFFICIENCY,
        "seconds_per_token": float(own.step_seconds.sum()) / max(tokens, 1),
    }


def _shape_cost(run: PlannedRun, costs: list[ShapeCost], rates: Rates, fits: list[Fit]) -> dict[str, Any]:
    paid = rates
    if run.args.compile_effort == "high" and rates.compile_high is not None:
        paid = rates._replace(compile_low=rates.compile_high)
    settings = describe(costs, paid, run.extent.steps)
    for setting, fit in zip(settings, fits, strict=True):
        setting["memory_bytes"] = fit.memory.total
    return {
        "settings": settings,
        "recommended": recommend(settings, [fit.is_possible for fit in fits]),
        "compile_effort": effort(rates, costs[0], run.args.compile_effort),
    }


def _sharing(run: PlannedRun, plain: Lines, report: TokenizeReport, options: PlanConfig) -> dict[str, Any]:
    """The sharing account of the sequences as tree rows would have them."""
    lines, report = tree_lines(run, plain, report)
    levels = group_numbers(run, report, options.group_column)
    # Rollouts share inside their groups whatever it costs, as GRPO's tree rows do; other data only where it pays.
    groups = levels["group"] if options.rollouts is not None else np.arange(len(lines.dataset))
    samples = [
        sample._replace(group=group)
        for sample, group in zip(read_samples(lines.dataset, range(len(groups))), groups.tolist(), strict=True)
    ]
    budget = run.args.max_length or max(len(sample.input_ids) for sample in samples)
    block = BLOCK if lines.packing is None else lines.packing.block_size
    account = share_account(samples, budget, run.config, run.remat, run.steps.dtype.itemsize, levels, block)
    return {"template": report.template, **account}
