"""Programs: one ahead-of-time compiled executable per kind of step and shape class, timed and counted.

A step function is compiled when a batch of a new class first arrives, or before, where `foresee` has told which
programs will come: `warm_up` compiles those in threads. That decides only when a program is compiled. Nothing else
compiles, so the count here is the number of programs of the run (one fused program per class where
gradient_accumulation_steps is 1; else one accumulation program per class and two that start and end a step).
"""

import os
import queue
import time
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from jaxtrl.hardware.compile_cache import cache_hits

WORKERS = 4  # threads that compile at the same time: each compilation has threads and memory of its own
Key = tuple[str, Hashable]


class Memory(NamedTuple):
    """Bytes that a program needs on a device; 0 where the backend has no figure."""

    arguments: int = 0  # those that are not reused for outputs
    outputs: int = 0
    temporaries: int = 0

    @property
    def total(self) -> int:
        return sum(self)


class Job(NamedTuple):
    """A program that will be needed: `function` is a jax.jit object, `args` are (abstract) arrays."""

    kind: str
    shape: Hashable
    function: Any
    args: tuple


class Program(NamedTuple):
    """One compiled program: its kind ("train", "eval", ...), its shape class, and what it took."""

    kind: str
    shape: Hashable
    seconds: float  # of tracing, lowering and compiling, or of loading from the persistent cache
    from_cache: bool
    memory: Memory
    waited: float = 0.0  # seconds for which a step waited for it
    was_foreseen: bool = True

    def metrics(self) -> dict[str, float | int | str]:
        """The fields as a line of metrics: `program` is the kind, each size and figure has a name of its own."""
        sizes = self.shape._asdict() if hasattr(self.shape, "_asdict") else {}
        return {
            "program": self.kind,
            **{f"program_{name}": size for name, size in sizes.items()},
            "program_seconds": self.seconds,
            "program_waited": self.waited,
            "program_from_cache": int(self.from_cache),
            "program_foreseen": int(self.was_foreseen),
            **{f"program_{name}_bytes": size for name, size in self.memory._asdict().items()},
        }


class Programs:
    """Calls jitted functions through executables that it compiles once per (kind, shape).

    `on_compile` is called from the thread that calls the programs, also for what other threads compiled.
    """

    def __init__(self, on_compile: Callable[[Program], None] | None = None):
        self.compiled: list[Program] = []
        self.calls: Counter[Key] = Counter()
        self.compiling = False  # whether a call waits for a compile right now; another thread may look
        self._executables: dict[Key, Any] = {}
        self._foreseen: dict[Key, Job] = {}
        self._pending: dict[Key, Future] = {}
        self._done: queue.SimpleQueue[tuple[Key, Any, Program]] = queue.SimpleQueue()
        self._pool: ThreadPoolExecutor | None = None
        self._on_compile = on_compile

    @property
    def count(self) -> int:
        return len(self.compiled)

    @property
    def seconds(self) -> float:
        """Seconds spent in tracing, lowering and compiling, or in loading from the persistent cache."""
        return sum((program.seconds for program in self.compiled), 0.0)

    @property
    def waited(self) -> float:
        """Seconds for which steps waited for programs."""
        return sum((program.waited for program in self.compiled), 0.0)

    @property
    def from_cache(self) -> int:
        return sum(program.from_cache for program in self.compiled)

    def metrics(self) -> dict[str, float | int]:
        """Counts and seconds of all programs so far."""
        return {
            "programs": self.count,
            "programs_from_cache": self.from_cache,
            "programs_unforeseen": sum(not program.was_foreseen for program in self.compiled),
            "compile_seconds": self.seconds,
        }

    def foresee(self, jobs: Iterable[Job]) -> None:
        """These programs will be needed, in about this order. Another shape of one of their kinds is a warning."""
        for job in jobs:
            self._foreseen.setdefault((job.kind, job.shape), job)

    @property
    def foreseen(self) -> list[Key]:
        return list(self._foreseen)

    def warm_up(self, wait: bool = True) -> None:
        """Compile what is foreseen in threads; without `wait` while the caller goes on.

        With `wait`, raises what the compiler raises. Without, a failed program is compiled again when it is called.
        """
        missing = [key for key in self._foreseen if key not in self._executables and key not in self._pending]
        if missing and self._pool is None:
            self._pool = ThreadPoolExecutor(min(WORKERS, os.cpu_count() or 1), "compile")
        for key in missing:
            assert self._pool is not None
            self._pending[key] = self._pool.submit(self._compile_ahead, self._foreseen[key])
        if wait:
            try:
                for future in list(self._pending.values()):
                    future.result()
                    self._take_done()
            finally:
                self.close()

    def close(self) -> None:
        """Drop what waits for a thread, and wait for the threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
        self._take_done()
        self._pending.clear()

    def call(self, kind: str, shape: Hashable, function: Any, *args: Any) -> Any:
        """`function(*args)` for a jax.jit object; `shape` must determine the shapes, dtypes and shardings of args.

        Raises TypeError (from JAX) when the arguments of a known (kind, shape) differ from the compiled ones: a compile
        that nobody counted cannot happen. A failed compile is not kept: the next call tries again.
        """
        key = kind, shape
        if self._pending:
            self._take_done()
        executable = self._executables.get(key)
        if executable is None:
            self.compiling = True
            try:
                executable = self._wait_for(key) or self._compile_now(Job(kind, shape, function, args))
            finally:
                self.compiling = False
        self.calls[key] += 1
        return executable(*args)

    def _wait_for(self, key: Key) -> Any:
        """The executable that a thread is compiling; None where none does or it fails."""
        future = self._pending.get(key)
        if future is None or future.cancel():  # not begun: no need to wait for a free thread
            self._pending.pop(key, None)
            return None
        start = time.perf_counter()
        failed = future.exception() is not None
        self._take_done(key, time.perf_counter() - start)
        self._pending.pop(key, None)
        return None if failed else self._executables[key]

    def _compile_now(self, job: Job) -> Any:
        key = job.kind, job.shape
        is_surprise = key not in self._foreseen and any(kind == job.kind for kind, _ in self._foreseen)
        if is_surprise:
            warnings.warn(self._describe_surprise(job), stacklevel=3)
        executable, program = _compile(job)
        self._keep(key, executable, program._replace(waited=program.seconds, was_foreseen=not is_surprise))
        return executable

    def _compile_ahead(self, job: Job) -> None:
        self._done.put(((job.kind, job.shape), *_compile(job)))

    def _take_done(self, waited_for: Key | None = None, seconds: float = 0.0) -> None:
        """Take over what threads have compiled."""
        while not self._done.empty():
            key, executable, program = self._done.get()
            self._pending.pop(key, None)
            self._keep(key, executable, program._replace(waited=seconds if key == waited_for else 0.0))

    def _keep(self, key: Key, executable: Any, program: Program) -> None:
        self._executables[key] = executable
        self.compiled.append(program)
        if self._on_compile is not None:
            self._on_compile(program)

    def _describe_surprise(self, job: Job) -> str:
        """One sentence: which sizes the foreseen shape nearest to this one has otherwise."""
        shapes = [shape for kind, shape in self._foreseen if kind == job.kind]
        nearest = min(shapes, key=lambda shape: len(_differences(shape, job.shape)))
        changed = ", ".join(f"{name} is {new} instead of {old}" for name, old, new in _differences(nearest, job.shape))
        return f"a {job.kind} program is compiled that was not foreseen: {changed} (nearest foreseen shape: {nearest})"


def _differences(old: Any, new: Any) -> list[tuple[str, Any, Any]]:
    """(name, old, new) of each size that differs."""
    if hasattr(old, "_fields") and type(old) is type(new):
        return [(n, a, b) for n, a, b in zip(old._fields, old, new, strict=True) if a != b]
    return [("the shape", old, new)] if old != new else []


def _compile(job: Job) -> tuple[Any, Program]:
    hits, start = cache_hits(), time.perf_counter()
    executable = job.function.lower(*job.args).compile()
    seconds = time.perf_counter() - start
    return executable, Program(job.kind, job.shape, seconds, cache_hits() > hits, _memory(executable))


def _memory(executable: Any) -> Memory:
    analysis = executable.memory_analysis()
    if analysis is None:
        return Memory()
    arguments = analysis.argument_size_in_bytes - analysis.alias_size_in_bytes
    return Memory(int(arguments), int(analysis.output_size_in_bytes), int(analysis.temp_size_in_bytes))
