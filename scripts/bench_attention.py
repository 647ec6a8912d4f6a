"""Attention of packed rows, forward and backward, beside torch's scaled_dot_product_attention and the matmul limit.

    python scripts/bench_attention.py [--documents 4 --length 512 --dtype float32 --repeats 20]

8 query and 4 key/value heads of 64. Both take turns in one process; medians and minima in ms. torch is optional: it
gets the documents as a batch of causal sequences (a packed row without its packing), its best case. The limit counts
the seven products of forward and backward over the needed blocks at XLA's matmul rate.
"""

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrl.hardware.machine import matmul_rate
from jaxtrl.hardware.memory import keep_freed_memory
from jaxtrl.model.attention import attend
from jaxtrl.rows.blocks import block_tables, choose_block_size, needed_blocks, visited_blocks

HEADS, KV_HEADS, HEAD_DIM = 8, 4, 64


def jax_pass(documents: int, length: int, block_size: int, dtype: str) -> tuple[Callable, np.ndarray, int]:
    tokens = documents * length
    visible = np.repeat(np.arange(1, documents + 1) * length, length).astype(np.int32)
    tables = block_tables(visible, block_size)
    rng = np.random.default_rng(0)
    q, out = (jnp.asarray(rng.standard_normal((tokens, HEADS, HEAD_DIM)), dtype) for _ in range(2))
    k, v = (jnp.asarray(rng.standard_normal((tokens, KV_HEADS, HEAD_DIM)), dtype) for _ in range(2))

    @jax.jit
    def run(q, k, v, out):
        return jax.vjp(lambda *x: attend(*x, jnp.asarray(visible), jax.tree.map(jnp.asarray, tables)), q, k, v)[1](out)

    compiled = run.lower(q, k, v, out).compile()
    return lambda: jax.block_until_ready(compiled(q, k, v, out)), visible, visited_blocks(tables)


def torch_pass(documents: int, length: int, dtype: str) -> Callable:
    import torch

    kind = getattr(torch, dtype)
    q, out = (torch.randn(documents, HEADS, length, HEAD_DIM, dtype=kind) for _ in range(2))
    k, v = (torch.randn(documents, KV_HEADS, length, HEAD_DIM, dtype=kind) for _ in range(2))
    for x in (q, k, v):
        x.requires_grad_()

    def run():
        result = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return torch.autograd.grad(result, (q, k, v), out)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--length", type=int, default=512, help="tokens of a document")
    parser.add_argument("--block_size", type=int, help="default: the trainer's choice for these documents")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    keep_freed_memory()
    lengths = np.full(args.documents, args.length)
    args.block_size = args.block_size or choose_block_size(lengths, lengths.sum(), jax.default_backend())
    run, visible, visited = jax_pass(args.documents, args.length, args.block_size, args.dtype)
    passes = {"jaxtrl": run}
    if importlib.util.find_spec("torch"):
        passes["torch"] = torch_pass(args.documents, args.length, args.dtype)
    times: dict[str, list[float]] = {name: [] for name in passes}
    rates = []
    for repeat in range(args.repeats + 1):
        rates.append(matmul_rate(jnp.dtype(args.dtype), repeats=3))
        for name, function in passes.items():
            start = time.perf_counter()
            function()
            if repeat:  # the first warms up
                times[name].append(1e3 * (time.perf_counter() - start))
    rate, needed = statistics.median(rates), needed_blocks(visible, args.block_size)
    limit = 1e3 * 14 * HEADS * HEAD_DIM * needed * args.block_size**2 / rate
    for name, values in times.items():
        print(f"{name}: median {statistics.median(values):.1f} ms, least {min(values):.1f} ms")
    if "torch" in times:
        ratios = [a / b for a, b in zip(times["jaxtrl"], times["torch"], strict=True)]
        print(f"jaxtrl / torch: median of the pairs {statistics.median(ratios):.2f}")
    own = statistics.median(times["jaxtrl"])
    print(f"needed blocks of {args.block_size} at {rate / 1e9:.0f} GFLOP/s: {limit:.1f} ms, ", end="")
    print(f"jaxtrl takes {own / limit:.2f} times that; visited {visited} of {needed} needed blocks")


if __name__ == "__main__":
    main()
