"""Which shapes and programs a run will have, known before its first step."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from jaxtrl.rows.batch import ShapeClass
from jaxtrl.rows.ladder import ShapeSet
from jaxtrl.rows.order import DataPosition
from jaxtrl.train.checkpoint import read_metadata
from jaxtrl.train.compiled import Job
from jaxtrl.trainers.data import Batches, RunBatches
from jaxtrl.trainers.extent import Extent
from jaxtrl.trainers.sft_config import SFTConfig
from jaxtrl.trainers.sft_data import data_seed, is_shuffled
from jaxtrl.trainers.sft_steps import SFTSteps

MANY = 8  # shapes of training batches from which on a hint is given


class Account(NamedTuple):
    """What a shape set makes of batches."""

    shapes: list[ShapeClass]  # that occur, in the order of their first batch
    padding: float  # share of the row tokens that are padding
    visits: float  # attention blocks visited per needed one, padding lanes counted


def account(run: RunBatches, shapes: ShapeSet, devices: int) -> Account:
    """The classes, padding and attention of these batches (at least one) under this set."""
    classes = [shapes.class_of(need) for need in run.needs.each()]
    padded = devices * sum(shape.tokens for shape in classes)
    visited = devices * sum(shape.tokens // shapes.block_size + shape.lanes for shape in classes)
    return Account(list(dict.fromkeys(classes)), 1 - int(run.tokens.sum()) / padded, visited / int(run.blocks.sum()))


def fix_shapes(batches: Batches, extent: Extent, args: SFTConfig, checkpoint: Path | None) -> None:
    """Choose the classes of a run's training batches, or take those of the run that is continued."""
    if checkpoint is not None:
        facts = read_metadata(checkpoint, "run")["facts"]
        if facts.get("pad_to_multiple_of") == args.pad_to_multiple_of:
            batches.shapes = ShapeSet.from_json(facts["the shape set"])
    elif batches.lines.count is not None:
        batches.fit(batches.foresee(extent.sizes, extent.steps, data_seed(args), is_shuffled(args)))


class Foresight(NamedTuple):
    """The programs that a run will have, and how its batches are padded (None: a stream does not tell)."""

    jobs: list[Job]
    training: Account | None

    def describe(self) -> str:
        """One line: how many programs of each kind, the share of padding, and what makes them fewer."""
        counts: dict[str, int] = {}
        for job in self.jobs:
            counts[job.kind] = counts.get(job.kind, 0) + 1
        programs = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        if self.training is None:
            return f"{programs}; padding is not known before the stream is read" if programs else "unknown for a stream"
        text = f"{programs}; {100 * self.training.padding:.1f} % padding in training"
        if len(self.training.shapes) < MANY:
            return text
        return f"{text} (fewer with packing, pad_to_multiple_of optimal:6 or max_programs)"


def foresee_run(
    steps: SFTSteps,
    batches: Mapping[str, Batches],
    extent: Extent,
    args: SFTConfig,
    start: DataPosition,
    done: int,
    scored: bool,
) -> Foresight:
    """The programs of a run that has `done` steps behind it and goes on at `start`."""
    train, training = batches["train"], None
    shapes = list(train.shapes.classes) if train.lines.packing is not None else []
    if train.lines.count is not None and done < extent.steps:
        run = train.foresee(extent.sizes, extent.steps - done, data_seed(args), is_shuffled(args), start)
        training = account(run, train.shapes, extent.sizes.devices)
        shapes = training.shapes
    jobs = list(steps.train_jobs(shapes, train.block)) if shapes else []
    if args.eval_strategy != "no" or args.eval_on_start:
        for name, evaluated in batches.items():
            if name != "train":
                jobs += eval_jobs(steps, evaluated, extent.sizes.devices, scored)
    return Foresight(list({(job.kind, job.shape): job for job in jobs}.values()), training)


def eval_jobs(steps: SFTSteps, batches: Batches, devices: int, scored: bool) -> Iterator[Job]:
    """The programs of an evaluation."""
    shapes = list(batches.shapes.classes) if batches.lines.packing is not None else []
    if batches.lines.count is not None:
        shapes = account(batches.foresee_in_order(devices), batches.shapes, devices).shapes
    return steps.eval_jobs(shapes, scored, batches.block)
