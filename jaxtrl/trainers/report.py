"""What is said before training and after it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from transformers import PreTrainedTokenizerBase

from jaxtrl.hardware.devices import describe_devices
from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.qwen3 import abstract_params
from jaxtrl.rows.batch import Sample, ShapeClass
from jaxtrl.rows.tokenize import TokenizeReport, show_example
from jaxtrl.train.compiled import Program, Programs
from jaxtrl.trainers.config import TrainConfig
from jaxtrl.trainers.data import Batches
from jaxtrl.trainers.extent import Extent
from jaxtrl.trainers.sft_config import SFTConfig

MAX_EXAMPLE_TOKENS = 200


def introduction(
    config: Qwen3Config,
    args: SFTConfig,
    dtype: np.dtype,
    extent: Extent,
    data: dict[str, tuple[TokenizeReport, Batches]],
    cache: str,
    programs: str,
) -> str:
    """Aligned `name  value` lines: model, devices, data, shapes, steps, and where things are kept."""
    sizes = extent.sizes
    lines = model_lines(config, args, dtype, sizes.devices)
    for name, (report, batches) in data.items():
        lines[name.replace("_", " ")] = f"{report.summary()}{batches.lines.describe()}"
    lines["shapes"] = f"pad_to_multiple_of {args.pad_to_multiple_of}"
    if classes := data["train"][1].shapes.classes:
        lines["shapes"] += f", rows of {', '.join(f'{size:,}' for size in sorted({c.tokens for c in classes}))} tokens"
    lines["programs"] = programs
    lines["steps"] = (
        f"{extent.steps:,} of {sizes.rows_per_step} rows ({sizes.per_device} a device, {sizes.devices} devices, "
        f"{sizes.accumulation} micro-batches), {extent.epochs} epochs"
    )
    lines["output"], lines["compile cache"] = str(args.output_dir), cache
    return aligned(lines)


def model_lines(config: Qwen3Config, args: TrainConfig, dtype: np.dtype, devices: int) -> dict[str, str]:
    """What is trained on which devices."""
    count = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(abstract_params(config)))
    head = "tied head" if config.tie_word_embeddings else "own head"
    return {
        "model": f"Qwen3, {count:,} parameters, {config.num_hidden_layers} layers, {head}",
        "devices": describe_devices(jax.devices()[:devices]),
        "compute": f"{dtype}, float32 parameters, {'' if args.gradient_checkpointing else 'no '}gradient checkpointing",
    }


def aligned(lines: Mapping[str, str]) -> str:
    """`name  value` lines."""
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())


def show_sample(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> str:
    """The decoded sample with rich markup: trained tokens green."""
    return show_example(tokenizer, sample.input_ids, sample.loss_mask, MAX_EXAMPLE_TOKENS)


def describe_compile(program: Program) -> str:
    source = "loaded from the compile cache" if program.from_cache else "compiled"
    memory = f", {program.memory.total / 2**30:.2f} GiB" if program.memory.total else ""
    return f"program {program.kind} {_describe_shape(program.shape)}: {source} in {program.seconds:.1f} s{memory}"


def _describe_shape(shape: Any) -> str:
    sizes = shape._asdict() if hasattr(shape, "_asdict") else {}
    return ", ".join(f"{size} {name}" for name, size in sizes.items())


def program_table(programs: Programs) -> str:
    """One line per compiled program: its sizes, how often it ran, what it took and where it came from."""
    lines: list[tuple[str, ...]] = [("program", "tokens", "slots", "terms", "lanes", "runs", "seconds", "from", "GiB")]
    for program in programs.compiled:
        sizes = program.shape if isinstance(program.shape, ShapeClass) else ("",) * 4
        source = "cache" if program.from_cache else "compiler"
        runs = programs.calls[program.kind, program.shape]
        gib = f"{program.memory.total / 2**30:.2f}"
        numbers = [f"{size:,}" if isinstance(size, int) else size for size in (*sizes, runs)]
        lines.append((program.kind, *numbers, f"{program.seconds:.1f}", source, gib))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            f"{cell:<{w}}" if i == 0 else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def summary(logs: dict[str, float | int], steps: int, programs: Programs, folder: Path) -> str:
    """The last lines of a run."""
    cached = f", {programs.from_cache} from the cache" if programs.from_cache else ""
    return (
        f"{steps:,} steps, {logs['num_tokens']:,} tokens, mean loss {logs['train_loss']:.4f} in "
        f"{logs['train_runtime']:.1f} s; {programs.count} programs took {programs.seconds:.1f} s{cached}\n"
        f"metrics: {folder / 'metrics.jsonl'}   checkpoints and model: {folder}"
    )
