"""The first account of a plan, shape cost: what each kind of shape set costs in programs, padding and time."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxtrl.model.config import Qwen3Config
from jaxtrl.planning.costs import Rates, step_flops
from jaxtrl.rows.batch import ShapeClass
from jaxtrl.trainers.data import Batches, RunBatches
from jaxtrl.trainers.extent import Extent
from jaxtrl.trainers.foresight import account

MARKS = (20, 100, 500)  # steps at which programs and time are told, beside the last


class Setting(NamedTuple):
    """One way to shape a run, and the batches that it then has. `options` are those of SFTConfig that choose it."""

    name: str
    options: dict[str, Any]
    batches: Batches
    extent: Extent
    run: RunBatches
    is_own: bool = False  # the run as it is configured


class ShapeCost(NamedTuple):
    """What a setting costs over a run. Arrays are over its optimizer steps."""

    setting: Setting
    programs: Int[np.ndarray, " steps"]  # training programs so far
    step_seconds: Float[np.ndarray, " steps"]
    classes: dict[ShapeClass, int]  # -> micro-batches, most frequent first
    padding: float
    visits: float

    def seconds(self, rates: Rates) -> Float[np.ndarray, " steps"]:
        """From the start to the end of each step, compiling included."""
        return np.cumsum(self.step_seconds) + rates.compile_low * self.programs


def shape_cost(setting: Setting, config: Qwen3Config, rates: Rates, remat: str, skips_lanes: bool) -> ShapeCost:
    """The account of one setting. `skips_lanes`: padding lanes of attention cost nothing (CPU)."""
    shapes, sizes, run = setting.batches.shapes, setting.extent.sizes, setting.run
    each = [shapes.class_of(need) for need in run.needs.each()]
    total = account(run, shapes, sizes.devices)
    first: dict[ShapeClass, int] = {}
    for step, shape in zip(run.step.tolist(), each, strict=True):
        first.setdefault(shape, step)
    size = shapes.block_size
    flops = {shape: step_flops(config, shape, 0 if skips_lanes else shape.lanes, size, remat).total for shape in first}
    device_flops = np.array([flops[shape] for shape in each])
    if skips_lanes:
        device_flops += step_flops(config, ShapeClass(0, 0, 0, 0), 1, size, remat).total * run.needs.lanes
    steps = setting.extent.steps
    new = np.bincount(list(first.values()), minlength=steps)
    new[0] += 2 if sizes.accumulation > 1 else 0  # the programs that begin and end a step
    return ShapeCost(
        setting,
        np.cumsum(new),
        rates.seconds(np.bincount(run.step, device_flops, minlength=steps)),
        dict(Counter(each).most_common()),
        total.padding,
        total.visits,
    )


def at_share(cost: ShapeCost, rates: Rates, steps: int) -> Float[np.ndarray, " steps"]:
    """Seconds at each of `steps` equal shares of the data. Packed and unpacked runs take other numbers of steps for the
    same data, so they are compared where they have seen the same share of it."""
    seconds = cost.seconds(rates)
    own = np.ceil(np.arange(1, steps + 1) * (len(seconds) / steps)).astype(np.int64)
    return seconds[np.clip(own, 1, len(seconds)) - 1]


def ahead_from(ours: Float[np.ndarray, " steps"], theirs: Float[np.ndarray, " steps"]) -> int | None:
    """The first step from which on to the end `ours` is not behind; None where it is behind at the end."""
    behind = np.flatnonzero(ours > theirs)
    if not len(behind):
        return 1
    return None if behind[-1] == len(ours) - 1 else int(behind[-1]) + 2


def describe(costs: Sequence[ShapeCost], rates: Rates, steps: int) -> list[dict[str, Any]]:
    """JSON of each setting; `steps`: those of the run as it is configured."""
    curves = [at_share(cost, rates, steps) for cost in costs]
    out = []
    for cost, curve in zip(costs, curves, strict=True):
        marks = {str(mark): min(mark, len(cost.programs)) for mark in MARKS} | {"all": len(cost.programs)}
        shares = {str(mark): min(mark, steps) for mark in MARKS} | {"all": steps}
        sizes = cost.setting.extent.sizes
        out.append(
            {
                "name": cost.setting.name,
                "options": cost.setting.options,
                "is_this_run": cost.setting.is_own,
                "per_device_train_batch_size": sizes.per_device,
                "steps": len(cost.programs),
                "programs": {name: int(cost.programs[step - 1]) for name, step in marks.items()},
                "padding_share": cost.padding,
                "visited_over_needed": cost.visits,
                "compile_minutes": {
                    name: float(cost.programs[step - 1]) * rates.compile_low / 60 for name, step in marks.items()
                },
                "minutes": {name: float(curve[step - 1]) / 60 for name, step in shares.items()},
                "ahead_from_step": {
                    other.setting.name: ahead_from(curve, theirs)
                    for other, theirs in zip(costs, curves, strict=True)
                    if other is not cost
                },
                "classes": [[*shape, count] for shape, count in cost.classes.items()],
            }
        )
    return out


def recommend(settings: list[dict[str, Any]], fits: Sequence[bool]) -> dict[str, Any]:
    """The setting (of `describe`) with the least time to the end of those that fit; of equals the first."""
    possible = [setting for setting, does_fit in zip(settings, fits, strict=True) if does_fit]
    if not possible:
        return {"name": None, "options": {}, "reason": "no setting fits into the device's memory"}
    best = min(possible, key=lambda setting: setting["minutes"]["all"])
    others = [setting for setting in possible if setting is not best]
    reason = (
        f"{best['minutes']['all']:.1f} minutes to the end, {best['compile_minutes']['all']:.1f} of them compiling "
        f"{best['programs']['all']} programs, with {100 * best['padding_share']:.1f} % padding"
    )
    if others:
        second = min(others, key=lambda setting: setting["minutes"]["all"])
        reason += (
            f"; next {second['name']} with {second['minutes']['all']:.1f} minutes, {second['programs']['all']} "
            f"programs and {100 * second['padding_share']:.1f} % padding"
        )
    return {"name": best["name"], "options": best["options"], "reason": reason}


def effort(rates: Rates, own: ShapeCost, current: str) -> dict[str, Any]:
    """When compile_effort high, which compiles longer and steps faster, pays for itself in this run."""
    out: dict[str, Any] = dict.fromkeys(("extra_compile_minutes", "step_share", "step_share_to_pay", "break_even_step"))
    out["current"] = current
    if rates.compile_high is None:
        return out
    steps = np.cumsum(own.step_seconds)
    extra = (rates.compile_high - rates.compile_low) * own.programs
    out["extra_compile_minutes"] = float(extra[-1]) / 60
    out["step_share"] = rates.step_share
    out["step_share_to_pay"] = float(np.clip(1 - extra[-1] / steps[-1], 0, 1))
    if rates.step_share is not None:
        out["break_even_step"] = ahead_from(extra + rates.step_share * steps, steps)
    return out
