"""`python -m jaxtrl.bench generate`: tokens per second of the sampler, beside what the memory can deliver.

One prompt of `prompt` random tokens, `batch` completions of `new` tokens each. Every program is compiled before.
`prefill_seconds` are those of the prompt's row and of its copies into the slots, `prefill_seconds_of_one` the same for
one completion. Decode bytes are weights and cache columns read per token, over the seconds of the decode calls; the
copy bandwidth counts bytes read and written. The filtered program (`filtered_ratio`: its decode seconds over those of
the plain one) is timed in turn with the plain one.

`--compare_bfloat16` adds the largest and the mean difference between the log-probs of a bfloat16 sampler and those that
`make_score_step` computes in bfloat16 for the same tokens. `--requests N` instead answers N short requests and reports
whether each was answered once, and the memory at a tenth of them and at the end.
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

from jaxtrl.bench.sft import DTYPES
from jaxtrl.hardware.machine import copy_rate, peak_rss_gib, rss_gib
from jaxtrl.hardware.memory import keep_freed_memory
from jaxtrl.model.hf import load_pretrained
from jaxtrl.model.qwen3 import model_params
from jaxtrl.rollout.engine import Engine
from jaxtrl.rollout.requests import SamplingParams
from jaxtrl.rollout.sampler import Sampler
from jaxtrl.rows.batch import Sample, concat_rows, make_batch
from jaxtrl.rows.ladder import ShapeSet
from jaxtrl.train.step import make_score_step

FILTERS: dict[str, Any] = {"top_k": 50, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1}


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m jaxtrl.bench generate", description=__doc__)
    out.add_argument("--model", required=True, help="folder of a Hugging Face Qwen3 checkpoint")
    out.add_argument("--batch", type=int, default=8, help="completions, as many as slots (default 8)")
    out.add_argument("--prompt", type=int, default=128, help="tokens of the prompt (default 128)")
    out.add_argument("--new", type=int, default=64, help="tokens of each completion (default 64)")
    out.add_argument("--tokens_per_call", type=int, default=8, help="tokens a device call (default 8)")
    out.add_argument("--repeats", type=int, default=3, help="timed runs, of which the median counts (default 3)")
    out.add_argument("--dtype", choices=DTYPES, default="float32", help="compute and cache dtype (default float32)")
    out.add_argument("--no_filtered", action="store_true", help="leave out the filtered program")
    out.add_argument("--compare_bfloat16", action="store_true", help="sampler against score step in bfloat16")
    out.add_argument("--requests", type=int, help="answer this many short requests instead")
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

    def take(self) -> list[float]:
        """The seconds since the last time they were taken."""
        taken, self.seconds = self.seconds, []
        return taken


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Time `repeats` generations; the keys of the result are those of the last line under `--json`."""
    model = load_pretrained(args.model)
    config, dtype = model.config, DTYPES[args.dtype]
    difference = bfloat16_difference(model, args) if args.compare_bfloat16 else {}
    sampler = Sampler(
        model,
        slots=args.batch,
        max_length=args.prompt + args.new,
        dtype=dtype,
        eos_token_id=(),
        tokens_per_call=args.tokens_per_call,
    )
    del model
    plain = SamplingParams(max_new_tokens=args.new, seed=0)
    filtered = replace(plain, **FILTERS)
    prompt = _prompt(config.vocab_size, args.prompt)
    sampler.generate([prompt], plain, args.batch)  # compiles
    programs = sampler.engine.programs.count
    if not args.no_filtered:
        sampler.generate([prompt], filtered, args.batch)
    engine = sampler.engine
    prefill, insert, decode = (Clock(engine, name) for name in ("prefill", "insert", "decode"))
    totals, rates = [], []
    calls: dict[str, list[float]] = {"plain": [], "filtered": [], "all": [], "one": []}
    for _ in range(args.repeats):
        rates.append(copy_rate())
        start = time.perf_counter()
        done = sampler.generate([prompt], plain, args.batch)
        totals.append(time.perf_counter() - start)
        assert all(len(completion.token_ids) == args.new for completion in done)
        calls["all"].append(sum(prefill.take() + insert.take()))
        calls["plain"] += decode.take()
        if not args.no_filtered:
            sampler.generate([prompt], filtered, args.batch)
            calls["filtered"] += decode.take()
        prefill.take(), insert.take()
        sampler.generate([prompt], replace(plain, max_new_tokens=1), 1)
        calls["one"].append(sum(prefill.take() + insert.take()))
        decode.take()
    seconds = {name: statistics.median(some) for name, some in calls.items() if some}
    rate = _bytes_per_step(engine) * args.tokens_per_call / seconds["plain"]
    copy = statistics.median(rates)
    return {
        "system": "jaxtrl",
        "dtype": args.dtype,
        "tokens_per_second": args.batch * args.new / statistics.median(totals),
        "prefill_seconds": seconds["all"],
        "prefill_seconds_of_one": seconds["one"],
        "decode_seconds_per_token": seconds["plain"] / args.tokens_per_call,
        "decode_bytes_per_second": rate,
        "copy_bytes_per_second": copy,
        "fraction_of_copy": rate / copy,
        **({} if args.no_filtered else {"filtered_ratio": seconds["filtered"] / seconds["plain"]}),
        **difference,
        "programs": programs,
        "peak_rss_gib": peak_rss_gib(),
    }


def _prompt(vocab: int, length: int) -> list[int]:
    return np.random.default_rng(0).integers(0, min(1000, vocab), length).tolist()


def _bytes_per_step(engine: Engine) -> int:
    """Weights and cache columns that a step reads."""
    config = engine.config
    weights = sum(x.nbytes for x in jax.tree.leaves(engine.weights.layers)) + engine.weights.head.nbytes
    columns = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * engine.columns
    return weights + columns * engine.slots * engine.cache_dtype.itemsize


def bfloat16_difference(model: Any, args: argparse.Namespace) -> dict[str, float]:
    """Log-probs of sampled tokens against those of the score step, both computed in bfloat16."""
    sampler = Sampler(model, slots=args.batch, max_length=args.prompt + args.new, dtype=jnp.bfloat16, eos_token_id=())
    prompt = _prompt(model.config.vocab_size, args.prompt)
    done = sampler.generate([prompt], SamplingParams(max_new_tokens=args.new, seed=0), args.batch)
    tokens = [np.concatenate([np.array(prompt, np.int32), completion.token_ids]) for completion in done]
    row = concat_rows([Sample(ids, np.arange(len(ids)) >= args.prompt) for ids in tokens])
    batch = make_batch([row], ShapeSet.from_setting("auto").classify([row]))
    scored = make_score_step(model.config, dtype=jnp.bfloat16)(model_params(model), batch)[0]
    logps = np.concatenate([completion.logps for completion in done])
    difference = np.abs(logps - np.asarray(scored)[0, : len(logps)])
    return {
        "bfloat16_logp_difference_max": float(difference.max()),
        "bfloat16_logp_difference_mean": float(difference.mean()),
    }


def run_requests(args: argparse.Namespace) -> dict[str, Any]:
    """Answer `requests` prompts of 1 to `prompt` tokens with 1 to `new` tokens each, all in one session."""
    sampler = Sampler(
        args.model,
        slots=args.batch,
        max_length=args.prompt + args.new,
        dtype=DTYPES[args.dtype],
        eos_token_id=(),
        tokens_per_call=args.tokens_per_call,
    )
    sampler.warm_up()
    programs, rng, vocab = sampler.engine.programs.count, np.random.default_rng(0), sampler.engine.config.vocab_size
    lengths = rng.integers(1, args.new + 1, args.requests)
    answers = np.zeros(args.requests, int)
    wrong = tokens = added = 0
    memory: dict[int, float] = {}
    start = time.perf_counter()
    with sampler.open() as session:
        while added < args.requests or session.pending:
            while added < args.requests and session.pending < 2 * args.batch:
                prompt = rng.integers(0, vocab, rng.integers(1, args.prompt + 1)).tolist()
                session.add(prompt, SamplingParams(max_new_tokens=int(lengths[added]), seed=added))
                added += 1
            for done in session.step():
                answers[done.prompt_index] += 1
                wrong += len(done.token_ids) != lengths[done.prompt_index]
                tokens += len(done.token_ids)
            memory.setdefault(10 * int(answers.sum()) // args.requests, rss_gib())
    seconds = time.perf_counter() - start
    return {
        "requests": args.requests,
        "answered_once": int((answers == 1).sum()),
        "wrong_length": int(wrong),
        "requests_per_second": args.requests / seconds,
        "tokens_per_second": tokens / seconds,
        "rss_gib_at_a_tenth": memory.get(1, memory[0]),
        "rss_gib_at_the_end": rss_gib(),
        "programs": programs,
        "programs_after_warm_up": sampler.engine.programs.count - programs,
    }


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    for name in ("batch", "prompt", "new", "tokens_per_call", "repeats", "requests"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser().error(f"--{name} is {getattr(args, name)}: it must be at least 1")
    if jax.default_backend() == "cpu":
        keep_freed_memory()
    result = run(args) if args.requests is None else run_requests(args)
    print(", ".join(f"{name} {value:.4g}" for name, value in result.items() if isinstance(value, int | float)))
    if args.json:
        print(json.dumps(result))
    return 0
