"""`python -m jaxtrl.bench sft`: SFT steps on real rows, timed one by one, beside the counted matmul limit.

Rows are taken in file order, `batch` a step, each truncated to `max_length`; every program is compiled before the first
timed step. The first step is left out of `tokens_per_second` (as in the baselines) and of `fraction_of_limit`.
`--parts` times the head's loss and gradient and the optimizer's update alone as well, each beside what bounds it; the
layers are what is left of the step.
"""

import argparse
import itertools
import json
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from transformers import AutoTokenizer

from jaxtrl.hardware.machine import copy_rate, matmul_rate, peak_rss_gib
from jaxtrl.hardware.memory import keep_freed_memory
from jaxtrl.model.hf import load_pretrained
from jaxtrl.model.qwen3 import model_params
from jaxtrl.model.sharding import place
from jaxtrl.rows.batch import RowBatch, Sample, concat_rows, make_batch
from jaxtrl.rows.blocks import DEFAULT_BLOCK_SIZE, visited_blocks
from jaxtrl.rows.ladder import ShapeSet
from jaxtrl.rows.needs import need_of, stack_needs
from jaxtrl.rows.sources import load_source
from jaxtrl.rows.tokenize import TokenizeOptions, tokenize_dataset
from jaxtrl.train.flops import Flops, train_flops
from jaxtrl.train.head import score
from jaxtrl.train.mesh import make_mesh, param_shardings, place_rows, shards_of
from jaxtrl.train.optimizer import make_optimizer
from jaxtrl.train.state import TrainState
from jaxtrl.train.step import TrainStep, make_sft_step, skip_lanes

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m jaxtrl.bench sft", description=__doc__)
    out.add_argument("--model", required=True, help="folder of a Hugging Face Qwen3 checkpoint with its tokenizer")
    out.add_argument("--data", required=True, help="JSONL file in any format that SFT takes")
    out.add_argument("--batch", type=int, default=4, help="rows a step (default 4)")
    out.add_argument("--max_length", type=int, default=512, help="tokens a row at most (default 512)")
    out.add_argument("--steps", type=int, default=6, help="optimizer steps (default 6)")
    out.add_argument("--dtype", choices=DTYPES, default="float32", help="compute dtype (default float32)")
    out.add_argument(
        "--gradient_checkpointing", choices=("true", "false"), default="true", help="default true, as in TRL"
    )
    out.add_argument(
        "--tensor",
        type=int,
        default=1,
        help="devices that share each row (default 1); on a CPU, JAX_NUM_CPU_DEVICES=N makes N",
    )
    out.add_argument("--compile_effort", choices=("low", "high"), default="low", help="high: unrolled layers")
    out.add_argument("--pad_to_multiple_of", default="none", help="shape set: none (default), auto, K, optimal:K")
    out.add_argument("--parts", action="store_true", help="where the time of the last step goes")
    out.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    return out


def batches(args: argparse.Namespace) -> list[tuple[RowBatch, int]]:
    """One `RowBatch` per step (`batch` rows flattened into one token row) and its number of real tokens."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    dataset = load_source(args.data)
    dataset = dataset.select(range(min(len(dataset), args.batch * args.steps)))
    tokenized, _ = tokenize_dataset(dataset, tokenizer, TokenizeOptions(max_length=args.max_length))
    samples = [Sample(np.asarray(row["input_ids"], np.int32), np.asarray(row["loss_mask"], bool)) for row in tokenized]
    setting = args.pad_to_multiple_of
    rows = [concat_rows(samples[i : i + args.batch]) for i in range(0, len(samples), args.batch)]
    needs = [need_of([row]) for row in rows]
    shapes = ShapeSet.from_setting(int(setting) if setting.isdigit() else setting).fit(stack_needs(needs))
    return [
        (skip_lanes(make_batch([row], shapes.class_of(need))), len(row.input_ids))
        for row, need in zip(rows, needs, strict=True)
    ]


def update_seconds(step: TrainStep, state: TrainState, repeats: int) -> tuple[TrainState, float]:
    """The state after `repeats` updates by a gradient of zeros, and their median time."""
    sums, seconds = step.init(state.params), []
    state, _ = jax.block_until_ready(step.apply(state, sums))
    for _ in range(repeats):
        start = time.perf_counter()
        state, _ = jax.block_until_ready(step.apply(state, sums))
        seconds.append(time.perf_counter() - start)
    return state, statistics.median(seconds)


def head_seconds(table: jax.Array, slots: int, dtype: Any, repeats: int) -> float:
    """Median time of the head's loss and gradient at random hidden states; `table` [vocab, d] is its weight."""
    hidden = jax.random.normal(jax.random.key(0), (slots, table.shape[1]), dtype)
    target = jax.random.randint(jax.random.key(1), (slots,), 0, table.shape[0])
    total = jax.jit(jax.value_and_grad(lambda h, w: score(h, w, target, cotangent=jnp.ones(slots)).total, (0, 1)))
    jax.block_until_ready(total(hidden, table))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(total(hidden, table))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def parts(step: TrainStep, state: TrainState, seconds: float, flops: Flops, slots: int, dtype: Any) -> dict[str, Any]:
    """Of a step that takes `seconds`: those of head, update and the rest, and what the machine's rates allow each.

    The update reads parameter, gradient (twice: its norm first) and both moments, and writes all but the gradient.
    """
    state, update = update_seconds(step, state, 3)
    table = state.params.get("lm_head", state.params["embed_tokens"])
    head = head_seconds(table, slots, dtype, 3)
    rate, moved = matmul_rate(dtype), 8 * sum(x.nbytes for x in jax.tree.leaves(state.params))
    return {
        "head": {"seconds": head, "limit_seconds": flops.head / rate},
        "layers": {"seconds": seconds - head - update, "limit_seconds": (flops.total - flops.head) / rate},
        "update": {"seconds": update, "limit_seconds": moved / copy_rate()},
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Time `steps` optimizer steps; the keys of the result are those of the last line under `--json`.

    Raises ValueError for `parts` with several devices, and for a number of them that the machine or the model refuses.
    """
    if args.parts and args.tensor != 1:
        raise ValueError("--parts measures one device: leave out --parts or --tensor")
    mesh = None if args.tensor == 1 else make_mesh(data=1, tensor=args.tensor)
    if jax.default_backend() == "cpu":
        keep_freed_memory()
    model = load_pretrained(args.model)
    config = model.config
    remat = "full" if args.gradient_checkpointing == "true" else "matmuls"
    # TRL's defaults: AdamW, linear schedule from 2e-5, clipping at 1.
    optimizer = make_optimizer(2e-5, args.steps, max_grad_norm=1.0)
    data = [(place_rows(batch, mesh), count) for batch, count in batches(args)]
    shards_of(mesh).check(config)
    params = model_params(model)
    state = TrainState.create(params if mesh is None else place(params, param_shardings(params, mesh)), optimizer)
    del model, params
    unroll = config.num_hidden_layers if args.compile_effort == "high" else 1
    step = make_sft_step(config, optimizer, mesh, dtype=DTYPES[args.dtype], remat=remat, unroll=unroll)
    start = time.perf_counter()
    programs: dict[Any, Any] = {}
    for batch, _ in data:
        shape = tuple(x.shape for x in jax.tree.leaves(batch))
        if shape not in programs:
            programs[shape] = step.fused.lower(state, batch).compile()
    compile_seconds = time.perf_counter() - start
    seconds, tokens, losses, counted = [], [], [], []
    rates = [matmul_rate(DTYPES[args.dtype])]
    for batch, count in data:
        start = time.perf_counter()
        state, metrics = programs[tuple(x.shape for x in jax.tree.leaves(batch))](state, batch)
        state, metrics = jax.block_until_ready((state, metrics))
        losses.append(float(metrics["loss"]))
        seconds.append(time.perf_counter() - start)
        tokens.append(count)
        pairs = visited_blocks(jax.tree.map(lambda x: x[0], batch.tables)) * DEFAULT_BLOCK_SIZE**2
        flops = train_flops(config, batch.input_ids.shape[1], pairs, batch.slot_index.shape[1], remat=remat)
        counted.append(flops.total)
        rates.append(matmul_rate(DTYPES[args.dtype]))
    # A step's limit is at the rates just before and after it: what the machine gives drifts within seconds.
    limits = [n / statistics.harmonic_mean(pair) for n, pair in zip(counted, itertools.pairwise(rates), strict=True)]
    timed = slice(1 if len(seconds) > 1 else 0, None)
    slots = data[-1][0].slot_index.shape[1]
    split = parts(step, state, seconds[-1], flops, slots, DTYPES[args.dtype]) if args.parts else None
    return {
        "system": "jaxtrl",
        "dtype": args.dtype,
        "tokens_per_second": sum(tokens[timed]) / sum(seconds[timed]),
        "seconds": seconds,
        "tokens": tokens,
        "losses": losses,
        "peak_rss_gib": peak_rss_gib(),
        "compile_seconds": compile_seconds,
        "programs": len(programs),
        "matmul_gflops": statistics.harmonic_mean(rates) / 1e9,
        "limit_seconds": limits,
        "fraction_of_limit": sum(limits[timed]) / sum(seconds[timed]),
        **({} if split is None else {"parts": split}),
    }


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    result = run(args)
    print(
        f"{result['tokens_per_second']:.0f} tokens/s, {result['peak_rss_gib']:.2f} GiB, {result['programs']} programs "
        f"compiled in {result['compile_seconds']:.1f} s, {100 * result['fraction_of_limit']:.0f} % of the limit "
        f"at {result['matmul_gflops']:.0f} GFLOP/s"
    )
    for name, part in result.get("parts", {}).items():
        print(f"  {name:7}{part['seconds']:.3f} s, the machine's rates allow {part['limit_seconds']:.3f} s")
    if args.json:
        print(json.dumps(result))
    return 0
