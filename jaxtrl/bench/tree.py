"""`python -m jaxtrl.bench tree`: the same samples as packed rows and as tree rows, forward and backward.

Both run in this process, one after the other in turn, on rows that are only filled up to the attention block. Samples
are either `--generations` completions of one prompt (random ids, completions trained) or, with `--data`, the rows of a
file, tokenised with the training template of Qwen3. Reported are medians over `--repeats`. The limit is the ratio of
the counted FLOPs of both sides: linear layers, attention (visible pairs only) and head, each forward, recomputed and
backward.
"""

import argparse
import json
import math
import statistics
import time
from typing import Any, NamedTuple

import jax
import numpy as np
from transformers import AutoTokenizer

from jaxtrl.bench.sft import DTYPES
from jaxtrl.hardware.machine import matmul_rate
from jaxtrl.hardware.memory import keep_freed_memory
from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.hf import load_pretrained
from jaxtrl.model.qwen3 import init_params, model_params
from jaxtrl.rows.batch import Row, RowBatch, Sample, concat_rows, make_batch
from jaxtrl.rows.blocks import DEFAULT_BLOCK_SIZE, needed_blocks, visited_blocks
from jaxtrl.rows.ladder import ShapeSet
from jaxtrl.rows.pack import pack_rows
from jaxtrl.rows.sources import load_source
from jaxtrl.rows.tokenize import TokenizeOptions, tokenize_dataset
from jaxtrl.rows.tree import tree_rows
from jaxtrl.train.flops import Flops, train_flops
from jaxtrl.train.optimizer import make_optimizer
from jaxtrl.train.step import TrainStep, make_sft_step

SHAPE_FLAGS = {"hidden": 512, "layers": 4, "heads": 8, "kv_heads": 4, "head_dim": 64, "mlp": 1536, "vocab": 8192}


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m jaxtrl.bench tree", description=__doc__)
    out.add_argument(
        "--shape", choices=("shared-prompt",), default="shared-prompt", help="of the samples without --data"
    )
    out.add_argument("--generations", type=int, default=4, help="completions of the prompt (default 4)")
    out.add_argument(
        "--prompt-fraction", type=float, default=0.9375, help="of a sample that is the prompt (default 0.9375)"
    )
    out.add_argument("--length", type=int, default=2048, help="tokens of a sample (default 2048)")
    out.add_argument("--data", help="file of samples in any format that SFT takes, instead of --shape; needs --model")
    out.add_argument("--rows", type=int, help="only the first rows of --data")
    out.add_argument("--token_budget", type=int, help="distinct tokens of a row at most (default: one row a side)")
    add_measurement(out)
    return out


def add_measurement(out: argparse.ArgumentParser) -> None:
    """The flags of what is measured how: model, dtype, repeats."""
    out.add_argument("--model", help="folder of a Hugging Face Qwen3 checkpoint, instead of the model flags")
    for name, default in SHAPE_FLAGS.items():
        out.add_argument(f"--{name}", type=int, default=default, help=f"of the model (default {default})")
    out.add_argument("--block_size", type=int, help="of attention (default: what fits each row best)")
    out.add_argument("--dtype", choices=DTYPES, default="float32", help="compute dtype (default float32)")
    out.add_argument("--repeats", type=int, default=5, help="timed passes of each side (default 5)")
    out.add_argument("--json", action="store_true", help="print one JSON object as the last line")


def shared_prompt(generations: int, length: int, prompt_fraction: float, vocab: int) -> list[Sample]:
    """Completions of one random prompt that differ from their first token on; all in one group."""
    prompt_length = round(length * prompt_fraction)
    if not 0 < prompt_length < length or not 0 < generations <= vocab:
        raise ValueError(
            f"a prompt of {prompt_length} of {length} tokens with {generations} completions: leave at least one token "
            f"to each, and have no more completions than the {vocab} tokens of the vocabulary"
        )
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, vocab, prompt_length)
    completions = rng.integers(0, vocab, (generations, length - prompt_length))
    completions[:, 0] = rng.permutation(vocab)[:generations]
    mask = np.arange(length) >= prompt_length
    return [Sample(np.concatenate([prompt, completion]).astype(np.int32), mask) for completion in completions]


def read_data(path: str, model: str, rows: int | None) -> list[Sample]:
    """The samples of a file; the turns of one `trajectory` (where there is such a column) are one group."""
    dataset = load_source(path)
    if rows is not None:
        dataset = dataset.select(range(min(rows, len(dataset))))
    options = TokenizeOptions(max_length=None, prefix_preserving=True)
    tokenized, _ = tokenize_dataset(dataset, AutoTokenizer.from_pretrained(model), options)
    names = list(range(len(tokenized)))
    if "trajectory" in dataset.column_names and len(dataset) == len(tokenized):  # no row was dropped
        names = list(dataset["trajectory"])
    numbers: dict[Any, int] = {}
    groups = [numbers.setdefault(name, len(numbers)) for name in names]
    return [
        Sample(np.asarray(row["input_ids"], np.int32), np.asarray(row["loss_mask"], bool), group=group)
        for row, group in zip(tokenized, groups, strict=True)
    ]


class Side(NamedTuple):
    """Rows of one kind, each with its compiled forward and backward pass, and what they cost."""

    rows: list[Row]
    batches: list[RowBatch]
    passes: list[Any]
    flops: Flops
    visited: int
    needed: int
    temporary_bytes: int  # of the largest program

    def run(self, params: Any) -> float:
        """Seconds for all rows."""
        start = time.perf_counter()
        for function, batch in zip(self.passes, self.batches, strict=True):
            jax.block_until_ready(function(params, batch))
        return time.perf_counter() - start


def compile_side(rows: list[Row], config: Qwen3Config, params: Any, step: TrainStep, block_size: int | None) -> Side:
    """Builds and compiles; rows are not padded beyond the attention block."""
    gradients = jax.jit(lambda params, batch: step.accumulate(params, step.init(params), batch))
    blocks = [block_size or fit_block_size(len(row.input_ids)) for row in rows]
    batches = []
    for row, block in zip(rows, blocks, strict=True):
        shape = ShapeSet.from_setting("none", block).classify([row])
        batches.append(make_batch([row], shape, block))
    programs = {shape_of(batch): gradients.lower(params, batch).compile() for batch in batches}
    tokens = sum(len(row.input_ids) for row in rows)
    pairs = sum(int((row.visible_until - np.arange(len(row.visible_until))).sum()) for row in rows)
    slots = sum(len(row.slot_index) for row in rows)
    return Side(
        rows,
        batches,
        [programs[shape_of(batch)] for batch in batches],
        train_flops(config, tokens, pairs, slots, remat="full"),
        sum(visited_blocks(jax.tree.map(lambda x: x[0], batch.tables)) for batch in batches),
        sum(needed_blocks(batch.visible_until[0], block) for batch, block in zip(batches, blocks, strict=True)),
        max(getattr(program.memory_analysis(), "temp_size_in_bytes", 0) for program in programs.values()),
    )


def fit_block_size(tokens: int) -> int:
    """The largest attention block of 128 to 320 tokens (multiples of 8) among those that fill up a row the least."""
    return max(range(128, 321, 8), key=lambda size: (-(-tokens // size) * -size, size))


def shape_of(batch: RowBatch) -> tuple[tuple[int, ...], ...]:
    return tuple(x.shape for x in jax.tree.leaves(batch))


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures both sides; the keys of the result are those of the last line under `--json`."""
    if jax.default_backend() == "cpu":
        keep_freed_memory()
    config, params = load_model(args)
    if args.data is None:
        samples = shared_prompt(args.generations, args.length, args.prompt_fraction, config.vocab_size)
    else:
        samples = read_data(args.data, args.model, args.rows)
    start = time.perf_counter()
    trees = tree_rows(samples, args.token_budget, block_size=args.block_size or DEFAULT_BLOCK_SIZE)
    planning = time.perf_counter() - start
    packs = [concat_rows(samples)] if args.token_budget is None else pack_rows(samples, args.token_budget)
    dtype = DTYPES[args.dtype]
    step = make_sft_step(config, make_optimizer(2e-5, 1), dtype=dtype)
    packed, tree = (compile_side(rows, config, params, step, args.block_size) for rows in (packs, trees))
    return {"samples": len(samples), "planning_seconds": planning, **compare(packed, tree, params, dtype, args.repeats)}


def compare(packed: Side, tree: Side, params: Any, dtype: Any, repeats: int) -> dict[str, Any]:
    """Times both sides in turn, between measurements of the machine's matrix-product rate."""
    losses = [
        sum(float(f(params, b).sums.loss) for f, b in zip(s.passes, s.batches, strict=True)) for s in (packed, tree)
    ]
    seconds: tuple[list[float], list[float]] = ([], [])
    rates = []
    for _ in range(repeats):
        rates.append(matmul_rate(dtype, repeats=3))
        for times, side in zip(seconds, (packed, tree), strict=True):
            times.append(side.run(params))
    packed_seconds, tree_seconds = map(statistics.median, seconds)
    speedups = [a / b for a, b in zip(*seconds, strict=True)]
    rate = statistics.median(rates)
    raw, unique = (sum(len(row.input_ids) for row in side.rows) for side in (packed, tree))
    speedup, limit = statistics.median(speedups), packed.flops.total / tree.flops.total
    return {
        "raw_tokens": raw,
        "unique_tokens": unique,
        "ratio": raw / unique,
        "packed_seconds": packed_seconds,
        "tree_seconds": tree_seconds,
        "speedup": speedup,
        "speedups": speedups,
        "limit": limit,
        "fraction_of_limit": speedup / limit,
        "memory_ratio": packed.temporary_bytes / tree.temporary_bytes,
        "packed_temporary_bytes": packed.temporary_bytes,
        "tree_temporary_bytes": tree.temporary_bytes,
        "visited_blocks": tree.visited,
        "needed_blocks": tree.needed,
        "packed_visited_blocks": packed.visited,
        "packed_needed_blocks": packed.needed,
        "packed_flops_of_limit": packed.flops.total / rate / packed_seconds,
        "tree_flops_of_limit": tree.flops.total / rate / tree_seconds,
        "matmul_gflops": rate / 1e9,
        "packed_loss": losses[0],
        "tree_loss": losses[1],
    }


def load_model(args: argparse.Namespace) -> tuple[Qwen3Config, Any]:
    if args.model is not None:
        model = load_pretrained(args.model)
        return model.config, model_params(model)
    config = Qwen3Config(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.mlp,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        tie_word_embeddings=True,
    )
    return config, jax.device_put(init_params(config, 0))


def finish(result: dict[str, Any], as_json: bool) -> int:
    """The exit code of a comparison: 1 where the two sides did not compute the same loss. Prints the JSON object."""
    if not math.isclose(result["packed_loss"], result["tree_loss"], rel_tol=1e-2):
        print("error: the two losses differ, so the two sides did not compute the same thing")
        return 1
    if as_json:
        print(json.dumps(result))
    return 0


def main(argv: list[str]) -> int:
    command = parser()
    args = command.parse_args(argv)
    if args.data is not None and args.model is None:
        command.error("--data needs --model: its tokenizer makes the ids")
    if args.repeats < 1 or (args.block_size is not None and args.block_size < 1):
        command.error("--repeats and --block_size must be at least 1")
    try:
        result = run(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", flush=True)
        return 1
    print(
        f"{result['samples']} samples, {result['raw_tokens']} tokens as packed rows, {result['unique_tokens']} as tree "
        f"rows (ratio {result['ratio']:.2f}, planned in {1e3 * result['planning_seconds']:.1f} ms)\n"
        f"forward and backward {result['packed_seconds']:.3f} s packed, {result['tree_seconds']:.3f} s as trees: "
        f"{result['speedup']:.2f} times faster, limit {result['limit']:.2f} "
        f"({100 * result['fraction_of_limit']:.0f} % of it), temporary memory {result['memory_ratio']:.2f} times less\n"
        f"attention blocks visited {result['visited_blocks']} of {result['needed_blocks']} needed; loss "
        f"{result['packed_loss']:.6g} packed, {result['tree_loss']:.6g} as trees"
    )
    return finish(result, args.json)
