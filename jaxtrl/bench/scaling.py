"""`python -m jaxtrl.bench scaling`: what a second process adds, on a CPU core each.

One process on one core, and two processes of one job on a core each (data parallel, gradients summed over loopback),
take SFT steps on a random row of `--tokens` tokens for each process. Both jobs are started and compiled once, then
timed in turn, `--repeats` times `--steps` steps; while one is timed the other waits. `ratio` is that of their tokens
per second, of which 2 is all: the median over the repeats.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np

from jaxtrl.bench.sft import DTYPES
from jaxtrl.bench.tree import add_measurement, load_model
from jaxtrl.hardware.environment import Processes
from jaxtrl.hardware.memory import keep_freed_memory
from jaxtrl.model.sharding import place
from jaxtrl.rows.batch import Sample, concat_rows, make_batch
from jaxtrl.rows.blocks import DEFAULT_BLOCK_SIZE
from jaxtrl.rows.ladder import ShapeSet
from jaxtrl.rows.needs import need_of
from jaxtrl.train.distributed import start_processes
from jaxtrl.train.mesh import mesh_of, param_shardings, place_rows
from jaxtrl.train.optimizer import make_optimizer
from jaxtrl.train.state import TrainState
from jaxtrl.train.step import make_sft_step, skip_lanes


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m jaxtrl.bench scaling", description=__doc__)
    out.add_argument("--tokens", type=int, default=2048, help="of the row of each process (default 2048)")
    out.add_argument("--steps", type=int, default=1, help="optimizer steps of a repeat (default 1)")
    add_measurement(out)
    out.set_defaults(hidden=256, mlp=1024, vocab=4096)
    out.add_argument("--port", type=int, help=argparse.SUPPRESS)
    out.add_argument("--process", type=int, help=argparse.SUPPRESS)
    return out


class Job:
    """The processes of one job, each held to a core, ready to take steps."""

    def __init__(self, argv: list[str], cores: list[int]):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        several = [["--port", str(port), "--process", str(number)] for number in range(len(cores))]
        flags = several if len(cores) > 1 else [["--process", "0"]]
        self._processes = [_start([*argv, *own], core) for own, core in zip(flags, cores, strict=True)]
        for process in self._processes:
            _answer(process)

    def step(self, steps: int) -> dict[str, float]:
        """Takes steps in all processes at the same time: seconds of the slowest, and the loss."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        answers = [_answer(process) for process in self._processes]
        return {"seconds": max(answer["seconds"] for answer in answers), "loss": answers[0]["loss"]}

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()  # no more steps: it ends, when the other does
        for process in self._processes:
            assert process.stdout is not None
            process.wait()
            process.stdout.close()


def _start(argv: list[str], core: int) -> subprocess.Popen:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})  # what is started now inherits it; a preexec_fn would fork beside JAX's threads
    try:
        command = [sys.executable, "-m", "jaxtrl.bench", "scaling", *argv]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment())
    finally:
        os.sched_setaffinity(0, cores)


def _environment() -> dict[str, str]:
    """One device a process."""
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}


def _answer(process: subprocess.Popen) -> dict[str, float]:
    """The next line of JSON that the process prints; gloo prints lines of its own."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            return json.loads(line)
    raise RuntimeError(f"a process of the bench ended with exit code {process.wait()}: see its error above")


def work(args: argparse.Namespace) -> None:
    """What each process of a job does: answer each number on stdin with the seconds of so many steps."""
    keep_freed_memory()
    if args.port is not None:
        start_processes(Processes(f"127.0.0.1:{args.port}", 2, args.process), 120, 600)
    mesh = mesh_of({})
    config, params = load_model(args)
    params = params if mesh is None else place(params, param_shardings(params, mesh))
    optimizer = make_optimizer(1e-5, 100)
    step = make_sft_step(config, optimizer, mesh, dtype=DTYPES[args.dtype])
    state = TrainState.create(params, optimizer)
    ids = np.random.default_rng(args.process).integers(0, config.vocab_size, args.tokens).astype(np.int32)
    row = concat_rows([Sample(ids, np.ones(args.tokens, bool))])
    size = args.block_size or DEFAULT_BLOCK_SIZE
    shape = ShapeSet.from_setting("none", size).class_of(need_of([row], size))
    batch = place_rows(skip_lanes(make_batch([row], shape, size)), mesh)
    state, metrics = jax.block_until_ready(step(state, batch))
    print(json.dumps({"loss": float(metrics["loss"])}), flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            state, metrics = jax.block_until_ready(step(state, batch))
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "loss": float(metrics["loss"])}), flush=True)


def run(args: argparse.Namespace, argv: list[str], cores: list[int]) -> dict[str, Any]:
    """Times both jobs in turn; the keys of the result are those of the last line under `--json`."""
    one, two = Job(argv, cores[:1]), Job(argv, cores[:2])
    try:
        pairs = [(one.step(args.steps), two.step(args.steps)) for _ in range(args.repeats)]
    finally:
        one.close()
        two.close()
    seconds = [[job["seconds"] for job in side] for side in zip(*pairs, strict=True)]
    tokens = args.tokens * args.steps
    speeds = [count * tokens / statistics.median(side) for count, side in enumerate(seconds, 1)]
    return {
        "ratio": statistics.median(2 * alone["seconds"] / both["seconds"] for alone, both in pairs),
        "tokens_per_second_one": speeds[0],
        "tokens_per_second_two": speeds[1],
        "seconds_one": seconds[0],
        "seconds_two": seconds[1],
        "loss_two": pairs[-1][1]["loss"],
        "load": os.getloadavg()[0],
    }


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    if args.process is not None:
        work(args)
        return 0
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        print("bench scaling needs two CPU cores", file=sys.stderr)
        return 2
    result = run(args, argv, cores)
    print(
        f"{result['tokens_per_second_one']:.0f} tokens/s with one process, {result['tokens_per_second_two']:.0f} with "
        f"two: {result['ratio']:.2f} times"
    )
    if args.json:
        print(json.dumps(result))
    return 0
