"""A plan: the data of a run read, its batches and programs foreseen, nothing trained."""

import dataclasses
import json
import math
from typing import Any, NamedTuple

import numpy as np
from datasets import IterableDataset
from jax.sharding import Mesh
from jaxtyping import Int
from transformers import PreTrainedTokenizerBase

from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.hf import resolve_model
from jaxtrl.planning.shapes import Setting
from jaxtrl.rows.chat import choose_template
from jaxtrl.rows.order import BatchSizes, epoch_order
from jaxtrl.rows.sources import load_source
from jaxtrl.rows.tokenize import TokenizeReport
from jaxtrl.train.compiled import Programs
from jaxtrl.train.mesh import mesh_of, row_count, shards_of
from jaxtrl.trainers.data import Batches, Lines, Packing, RunBatches
from jaxtrl.trainers.extent import Extent
from jaxtrl.trainers.foresight import fix_shapes
from jaxtrl.trainers.model_source import load_tokenizer, tiny_model
from jaxtrl.trainers.sft_config import SFTConfig
from jaxtrl.trainers.sft_data import SHUFFLE_ONCE, data_seed, fit_packing, is_shuffled, make_batches, prepare_data
from jaxtrl.trainers.sft_steps import SFTSteps
from jaxtrl.trainers.steps import make_adamw

OPTIMAL = 6  # sizes of the `optimal:K` that is compared
COMPARED = ("auto", f"optimal:{OPTIMAL}", 128, "none")
GROUP_COLUMNS = ("trajectory", "group")


class PlannedRun(NamedTuple):
    """What the trainer would train on with these options."""

    args: SFTConfig
    config: Qwen3Config
    tokenizer: PreTrainedTokenizerBase
    source: Any  # what the training data were read from
    report: TokenizeReport
    batches: dict[str, Batches]  # "train", "eval"
    extent: Extent
    steps: SFTSteps

    @property
    def remat(self) -> str:
        return "full" if self.args.gradient_checkpointing else "matmuls"

    @property
    def lines(self) -> Lines:
        lines = self.batches["train"].lines
        assert isinstance(lines, Lines)
        return lines

    def foreseen(self) -> RunBatches:
        """The batches of the run."""
        return _foresee(self, self.batches["train"])


def find_config(args: SFTConfig) -> tuple[Qwen3Config, PreTrainedTokenizerBase]:
    """Of the model that is named (its weights are not needed), or of the embedded default."""
    if args.model_name_or_path is None:
        model, tokenizer = tiny_model(args.seed)
        return model.config, tokenizer
    folder = resolve_model(args.model_name_or_path)
    return Qwen3Config.from_pretrained(folder), load_tokenizer(folder, args.trust_remote_code)


def prepare(
    args: SFTConfig,
    config: Qwen3Config,
    tokenizer: PreTrainedTokenizerBase,
    train: Any,
    evaluation: Any = None,
) -> PlannedRun:
    """Reads and tokenises the data as the trainer does. Raises ValueError for data that cannot be trained on, and for
    a stream, whose lengths are not known."""
    if args.dataset_streaming or isinstance(train, IterableDataset):
        raise ValueError("dataset_streaming: a plan needs the lengths of all rows, leave it out to plan")
    mesh = mesh_of(args.mesh_sizes())
    shards_of(mesh).check(config)
    devices = row_count(mesh)
    data, batches = make_batches("train", train, tokenizer, args, config.vocab_size, mesh)
    every = {"train": batches}
    if evaluation is not None:
        every["eval"] = make_batches("eval", evaluation, tokenizer, args, config.vocab_size, mesh)[1]
    sizes = BatchSizes(batches.per_device, devices, args.gradient_accumulation_steps)
    total = sizes.total_steps(batches.lines.count, args.num_train_epochs, args.max_steps)
    extent = Extent(sizes, batches.lines.count, total)
    run = PlannedRun(args, config, tokenizer, train, data.report, every, extent, _make_steps(config, args, mesh, total))
    fix_shapes(batches, extent, args, None)
    return run


def steps_with(run: PlannedRun, **options: Any) -> SFTSteps:
    """The run's steps under other options."""
    args = dataclasses.replace(run.args, **options)
    return _make_steps(run.config, args, run.steps.mesh, run.extent.steps)


def _make_steps(config: Qwen3Config, args: SFTConfig, mesh: Mesh | None, total: int) -> SFTSteps:
    steps = SFTSteps(config, args, mesh, Programs())
    steps.prepare_training(make_adamw(args, total)[0])
    return steps


def plain_lines(run: PlannedRun) -> tuple[Lines, TokenizeReport]:
    """The sequences one by one, as an unpacked run has them."""
    lines = run.lines
    if lines.packing is None:
        return lines, run.report
    if lines.packing.strategy == "bfd":
        return Lines(lines.dataset), run.report
    return _prepared(run, packing=False)


def tree_lines(run: PlannedRun, plain: Lines, report: TokenizeReport) -> tuple[Lines, TokenizeReport]:
    """The sequences as they are tokenised for tree rows, not planned."""
    if run.lines.packing is not None and run.lines.packing.strategy == "tree":
        return run.lines, run.report
    wanted = (
        None
        if report.template is None
        else choose_template(run.tokenizer, marked=run.args.assistant_only_loss, prefix_preserving=True).name
    )
    if wanted == report.template:
        return plain, report
    return _prepared(run, packing=True, packing_strategy="tree")


def _prepared(run: PlannedRun, **options: Any) -> tuple[Lines, TokenizeReport]:
    args = dataclasses.replace(run.args, **options)
    if args.max_length is None:
        args = dataclasses.replace(args, packing=False)
    data = prepare_data(
        run.source,
        run.tokenizer,
        args,
        run.config.vocab_size,
        packed=args.packing,
        shuffled=args.shuffle_dataset,
    )
    assert isinstance(data.lines, Lines)
    return data.lines, data.report


def compare(run: PlannedRun, plain: Lines) -> list[Setting]:
    """The run as it is configured, then its sequences unpacked under each rule, then packed; each with about as many
    tokens a step as the run has, and steps for the same share of the data. Tree rows are compared with tree rows, so
    that what sharing saves stays out of this account."""
    args, own = run.args, run.batches["train"]
    found = [Setting(_own_name(args), {}, own, run.extent, run.foreseen(), is_own=True)]
    is_tree = args.packing and args.packing_strategy == "tree"
    lines = run.lines if is_tree else plain
    rows = own.per_device
    if args.packing:
        rows = max(1, round(rows * lines.count / run.lines.count))
    unpadded = Batches(lines, rows, "none")
    exact = _foresee(run, unpadded)
    largest = max(1, -(-int(exact.needs.tokens.max()) // unpadded.block)) * unpadded.block
    for rule in (*COMPARED, f"fixed:{largest}"):
        options = {"packing": is_tree, "pad_to_multiple_of": rule, "per_device_train_batch_size": rows}
        if not _is_own(args, options):
            fills_lines = is_tree and rule == "auto"  # then the lines of a row need more than under the other rules
            found.append(_setting(run, str(rule), options, Batches(lines, rows, rule), None if fills_lines else exact))
    if args.max_length is not None and not is_tree:
        options = {"packing": True, "packing_strategy": "bfd", "pad_to_multiple_of": "auto"}
        mean = float(exact.needs.tokens.mean())
        packed_rows = own.per_device if args.packing else max(1, round(mean / args.max_length))
        options["per_device_train_batch_size"] = packed_rows
        if not _is_own(args, options):
            packed = Lines(plain.dataset, fit_packing(Packing("bfd", args.max_length), plain.dataset, "auto"))
            found.append(_setting(run, "packing bfd", options, Batches(packed, packed_rows)))
    return found


def _own_name(args: SFTConfig) -> str:
    packing = f"packing {args.packing_strategy}, " if args.packing else ""
    merged = "" if args.max_programs is None else f", max_programs {args.max_programs}"
    window = "" if args.batch_window == 1 else f", batch_window {args.batch_window}"
    return f"this run: {packing}{args.pad_to_multiple_of}{merged}{window}"


def _is_own(args: SFTConfig, options: dict[str, Any]) -> bool:
    """Whether these options are what the run has anyway."""
    return (
        args.max_programs is None
        and args.batch_window == 1
        and all(
            getattr(args, name) == value
            for name, value in options.items()
            if args.packing or name != "packing_strategy"
        )
    )


def _setting(
    run: PlannedRun,
    name: str,
    options: dict[str, Any],
    batches: Batches,
    foreseen: RunBatches | None = None,
) -> Setting:
    """`foreseen`: the batches, where they are known; else they are listed here."""
    foreseen = _foresee(run, batches) if foreseen is None else foreseen
    batches.fit(foreseen)
    return Setting(name, options, batches, _extent(run, batches), foreseen)


def _extent(run: PlannedRun, batches: Batches) -> Extent:
    """As many steps as it takes to train the same share of the data."""
    sizes = dataclasses.replace(run.extent.sizes, per_device=batches.per_device)
    count = batches.lines.count
    assert count is not None
    assert run.extent.count is not None  # streams are refused
    epochs = run.extent.steps / run.extent.sizes.steps_per_epoch(run.extent.count)
    return Extent(sizes, count, max(1, math.ceil(epochs * sizes.steps_per_epoch(count) - 1e-9)))


def _foresee(run: PlannedRun, batches: Batches) -> RunBatches:
    extent = _extent(run, batches)
    return batches.foresee(extent.sizes, extent.steps, data_seed(run.args), is_shuffled(run.args))


def group_numbers(
    run: PlannedRun, report: TokenizeReport, column: str | None
) -> dict[str, Int[np.ndarray, " samples"]]:
    """By column, the number of each kept sample's value: `column`, or those of GROUP_COLUMNS that the data has."""
    source = load_source(run.source)
    names = [name for name in GROUP_COLUMNS if name in source.column_names] if column is None else [column]
    if column is not None and column not in source.column_names:
        raise ValueError(
            f"group_column: the data has no column {column!r}; it has {', '.join(map(repr, source.column_names))}"
        )
    out = {}
    for name in names:
        values = [json.dumps(value, sort_keys=True, default=str) for value in source[name]]
        number = np.unique(values, return_inverse=True)[1].astype(np.int64)[report.kept_rows]
        if run.args.shuffle_dataset:
            number = number[epoch_order(data_seed(run.args), SHUFFLE_ONCE, len(number))]
        out[name] = number
    return out
