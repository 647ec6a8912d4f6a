"""`python -m jaxtrl.bench combined`: tree rows and a fixed shape set, each alone and both together.

{packed rows, tree rows} x {exact shapes, shape set} over the same samples, one row a step: as many as fill `--steps`
packed rows, over several epochs where the file has fewer. Tree rows take fewer steps for them. Each cell trains with
`SFTTrainer` in a fresh process without a compile cache. Exact shapes fill the last block only (`pad_to_multiple_of
none`); the shape set is the default (`auto`). Several files are measured one after the other.
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
from typing import Any

CELLS = {
    "packed, exact shapes": ("bfd", "none"),
    "packed, shape set": ("bfd", "auto"),
    "tree, exact shapes": ("tree", "none"),
    "tree, shape set": ("tree", "auto"),
}
SAMPLES = "samples.parquet"
KEYS = ("seconds", "compile_seconds", "step_seconds", "programs", "steps", "tokens", "packing_ratio", "memory_gib")


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m jaxtrl.bench combined", description=__doc__)
    out.add_argument("--model", required=True, help="folder of a Hugging Face Qwen3 checkpoint with its tokenizer")
    out.add_argument("--data", required=True, nargs="+", help="files in any format that SFT takes, one after the other")
    out.add_argument("--steps", type=int, default=50, help="packed rows, one a step (default 50)")
    out.add_argument("--max_length", type=int, default=2048, help="tokens of a row at most (default 2048)")
    out.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    out.add_argument("--cell", nargs=4, help=argparse.SUPPRESS)  # strategy, shapes, folder of the samples, epochs
    return out


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    if args.cell is not None:
        strategy, shapes, folder, epochs = args.cell
        print(json.dumps(run_cell(args.model, strategy, shapes, folder, float(epochs), args.max_length)))
        return 0
    results = {}
    for path in args.data:
        with tempfile.TemporaryDirectory() as folder:
            count, epochs = choose_samples(args.model, path, args.steps, args.max_length, folder)
            cells = {name: _measure(args, (*cell, folder, str(epochs))) for name, cell in CELLS.items()}
        results[Path(path).name] = {"samples": count, "epochs": epochs, "cells": cells}
        print(f"{path}: {count:,} samples, {epochs:.2f} epochs, load {os.getloadavg()[0]:.1f}")
        for name, cell in cells.items():
            print(f"  {name:22}" + "  ".join(f"{key} {cell[key]:.4g}" for key in KEYS))
    if args.json:
        print(json.dumps({"model": args.model, "max_length": args.max_length, "data": results}))
    return 0


def choose_samples(model: str, path: str, steps: int, max_length: int, folder: str) -> tuple[int, float]:
    """Writes the first samples of the file that make `steps` packed rows (all, where they make fewer), tokenised as for
    tree rows, to `folder`; returns their number and the epochs that `steps` rows are."""
    import numpy as np
    from transformers import AutoTokenizer

    from jaxtrl.rows.pack import pack_indices
    from jaxtrl.rows.sources import load_source
    from jaxtrl.rows.tokenize import TokenizeOptions, tokenize_dataset

    tokenizer = AutoTokenizer.from_pretrained(model)
    options = TokenizeOptions(max_length=max_length, prefix_preserving=True)
    tokenized, _ = tokenize_dataset(load_source(path), tokenizer, options)
    lengths = np.array([len(ids) for ids in tokenized["input_ids"]])
    low, high = 1, len(lengths)
    while low < high:  # the fewest samples that make so many rows
        middle = (low + high) // 2
        low, high = (low, middle) if len(pack_indices(lengths[:middle], max_length)) >= steps else (middle + 1, high)
    chosen = tokenized.select(range(low))
    pairs = zip(chosen["input_ids"], chosen["loss_mask"], strict=True)
    labels = [[i if trained else -100 for i, trained in zip(*pair, strict=True)] for pair in pairs]
    chosen.remove_columns(["loss_mask"]).add_column("labels", labels).to_parquet(str(Path(folder) / SAMPLES))
    return low, steps / len(pack_indices(lengths[:low], max_length))


def _measure(args: argparse.Namespace, cell: tuple[str, str, str, str]) -> dict[str, Any]:
    """A cell in a process of its own: nothing that another has compiled can be found again."""
    command = [sys.executable, "-m", "jaxtrl.bench", "combined", "--model", args.model, "--data", "-"]
    command += ["--max_length", str(args.max_length), "--cell", *cell]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"the cell {cell[0]}, {cell[1]} failed: {reason}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def run_cell(model: str, strategy: str, shapes: str, folder: str, epochs: float, max_length: int) -> dict[str, Any]:
    """Trains on the samples in `folder`; seconds are those of the training loop, compiling included."""
    import jax

    from jaxtrl.hardware.machine import peak_rss_gib
    from jaxtrl.hardware.memory import keep_freed_memory
    from jaxtrl.trainers.sft_config import SFTConfig
    from jaxtrl.trainers.sft_trainer import SFTTrainer

    if jax.default_backend() == "cpu":
        keep_freed_memory()
    args = SFTConfig(
        output_dir=str(Path(folder) / f"{strategy}-{shapes}"),
        max_length=max_length,
        packing=True,
        packing_strategy=strategy,
        pad_to_multiple_of=shapes,
        per_device_train_batch_size=1,
        num_train_epochs=epochs,
        save_strategy="no",
        logging_steps=1,
        compile_cache="off",
        disable_tqdm=True,
    )
    trainer = SFTTrainer(model, args, train_dataset=str(Path(folder) / SAMPLES))
    start = time.perf_counter()
    done = trainer.train()
    seconds = time.perf_counter() - start
    compiled = trainer.programs.seconds
    logged = [entry for entry in trainer.state.log_history if "packing_ratio" in entry]
    return {
        "seconds": seconds,
        "compile_seconds": compiled,
        "step_seconds": (seconds - compiled) / done.global_step,
        "programs": trainer.programs.count,
        "steps": done.global_step,
        "tokens": int(done.metrics["num_tokens"]),
        "packing_ratio": statistics.fmean(entry["packing_ratio"] for entry in logged),
        "padding_share": statistics.fmean(entry["padding_share"] for entry in logged),
        "memory_gib": peak_rss_gib(),
        "loss": done.training_loss,
    }
