"""`python -m jaxtrl.bench generate`: tokens per second of the sampler, beside what the memory can deliver.

One prompt of `prompt` random tokens, `batch` completions of `new` tokens each. Every program is compiled before.
`prefill_seconds` are those of the prompt's row and of its copies into the slots; decode bytes are weights and cache
columns read per token, over the seconds of the decode calls; the copy bandwidth counts bytes read and written.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrl.bench.machine import copy_rate, peak_rss_gib
from jaxtrl.bench.sft import DTYPES
from jaxtrl.hardware.memory import keep_freed_memory
from jaxtrl.model.hf import load_pretrained
from jaxtrl.rollout.requests import SamplingParams
from jaxtrl.rollout.sampler import Sampler


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m jaxtrl.bench generate", description=__doc__)
    out.add_argument("--model", required=True, help="folder of a Hugging Face Qwen3 checkpoint")
    out.add_argument("--batch", type=int, default=8, help="completions, as many as slots (default 8)")
    out.add_argument("--prompt", type=int, default=128, help="tokens of the prompt (default 128)")
    out.add_argument("--new", type=int, default=64, help="tokens of each completion (default 64)")
    out.add_argument("--tokens_per_call", type=int, default=8, help="tokens a device call (default 8)")
    out.add_argument("--repeats", type=int, default=3, help="timed runs, of which the median counts (default 3)")
    out.add_argument("--dtype", choices=DTYPES, default="float32", help="compute and cache dtype (default float32)")
    out.add_argument(
        "--filtered", action="store_true", help="top_k 50, top_p 0.95, min_p 0.01 and a repetition penalty"
    )
    out.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    return out


class Clock:
    """Wraps a method of an object: seconds of each call."""

    def __init__(self, owner: Any, name: str):
        self.seconds: list[float] = []
        self._call = getattr(owner, name)
        setattr(owner, name, self)

    def __call__(self, *args: Any) -> Any:
        start = time.perf_counter()
        out = jax.block_until_ready(self._call(*args))
        self.seconds.append(time.perf_counter() - start)
        return out


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Time `repeats` generations; the keys of the result are those of the last line under `--json`."""
    if jax.default_backend() == "cpu":
        keep_freed_memory()
    dtype = DTYPES[args.dtype]
    model = load_pretrained(args.model)
    length = args.prompt + args.new
    sampler = Sampler(
        model, slots=args.batch, max_length=length, dtype=dtype, eos_token_id=(), tokens_per_call=args.tokens_per_call
    )
    vocab = model.config.vocab_size
    del model
    params = SamplingParams(max_new_tokens=args.new, seed=0)
    if args.filtered:
        params = replace(params, top_k=50, top_p=0.95, min_p=0.01, repetition_penalty=1.1)
    prompt = np.random.default_rng(0).integers(0, min(1000, vocab), args.prompt).tolist()
    sampler.generate([prompt], params, args.batch)  # compiles
    engine = sampler.engine
    programs, decode = engine.programs.count, Clock(engine, "decode")
    prefill, insert = Clock(engine, "prefill"), Clock(engine, "insert")
    totals, rates = [], []
    for _ in range(args.repeats):
        rates.append(copy_rate())
        start = time.perf_counter()
        done = sampler.generate([prompt], params, args.batch)
        totals.append(time.perf_counter() - start)
        assert all(len(completion.token_ids) == args.new for completion in done)
    call = statistics.median(decode.seconds)
    item = jnp.dtype(dtype).itemsize
    weights = sum(x.nbytes for x in jax.tree.leaves(engine.weights.layers)) + engine.weights.head.nbytes
    config = engine.config
    columns = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * engine.columns * item
    rate = (weights + columns * args.batch) * args.tokens_per_call / call
    return {
        "system": "jaxtrl",
        "dtype": args.dtype,
        "filtered": args.filtered,
        "tokens_per_second": args.batch * args.new / statistics.median(totals),
        "prefill_seconds": (sum(prefill.seconds) + sum(insert.seconds)) / args.repeats,
        "decode_seconds_per_token": call / args.tokens_per_call,
        "decode_bytes_per_second": rate,
        "copy_bytes_per_second": statistics.median(rates),
        "fraction_of_copy": rate / statistics.median(rates),
        "programs": programs,
        "peak_rss_gib": peak_rss_gib(),
    }


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    for name in ("batch", "prompt", "new", "tokens_per_call", "repeats"):
        if getattr(args, name) < 1:
            parser().error(f"--{name} is {getattr(args, name)}: it must be at least 1")
    result = run(args)
    print(
        f"{result['tokens_per_second']:.0f} tokens/s, prefill {result['prefill_seconds']:.3f} s, "
        f"{1000 * result['decode_seconds_per_token']:.1f} ms per token of all slots, "
        f"{100 * result['fraction_of_copy']:.0f} % of the copy bandwidth, {result['programs']} programs, "
        f"{result['peak_rss_gib']:.2f} GiB"
    )
    if args.json:
        print(json.dumps(result))
    return 0
