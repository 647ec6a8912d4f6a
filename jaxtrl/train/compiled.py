"""Programs: one ahead-of-time compiled executable per kind of step and shape class, timed and counted.

A step function is compiled when a batch of a new class first arrives and is kept. Nothing else compiles, so the count
here is the number of programs of the run (one fused program per class where gradient_accumulation_steps is 1; else one
accumulation program per class and one update program).
"""

import time
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax

from jaxtrl.hardware.compile_cache import cache_hits


class Program(NamedTuple):
    """One compiled program: its kind ("train", "eval", ...), its shape class, and what it took."""

    kind: str
    shape: Hashable
    seconds: float
    from_cache: bool
    memory_bytes: (
        int  # arguments, outputs and temporaries that are alive at the peak; 0 where the backend has no figure
    )


class Programs:
    """Calls jitted functions through executables that it compiles once per (kind, shape)."""

    def __init__(self, on_compile: Callable[[Program], None] | None = None):
        self.compiled: list[Program] = []
        self._executables: dict[tuple[str, Hashable], Any] = {}
        self._on_compile = on_compile

    @property
    def count(self) -> int:
        return len(self.compiled)

    @property
    def seconds(self) -> float:
        """Seconds spent in tracing, lowering and compiling, or in loading from the persistent cache."""
        return sum((program.seconds for program in self.compiled), 0.0)

    @property
    def from_cache(self) -> int:
        return sum(program.from_cache for program in self.compiled)

    def call(self, kind: str, shape: Hashable, function: Any, *args: Any) -> Any:
        """`function(*args)` for a jax.jit object; `shape` must determine the shapes, dtypes and shardings of args.

        Raises TypeError (from JAX) when the arguments of a known (kind, shape) differ from the compiled ones: a compile
        that nobody counted cannot happen.
        """
        executable = self._executables.get((kind, shape))
        if executable is None:
            executable = self._compile(kind, shape, function, args)
        return executable(*args)

    def _compile(self, kind: str, shape: Hashable, function: Any, args: tuple) -> Any:
        jax.block_until_ready(args)  # a step that still runs has seconds of its own, which are not those of compiling
        hits, start = cache_hits(), time.perf_counter()
        executable = function.lower(*args).compile()
        seconds = time.perf_counter() - start
        program = Program(kind, shape, seconds, cache_hits() > hits, _memory(executable))
        self._executables[kind, shape] = executable
        self.compiled.append(program)
        if self._on_compile is not None:
            self._on_compile(program)
        return executable


def _memory(executable: Any) -> int:
    analysis = executable.memory_analysis()
    if analysis is None:
        return 0
    arguments = analysis.argument_size_in_bytes - analysis.alias_size_in_bytes
    return int(arguments + analysis.output_size_in_bytes + analysis.temp_size_in_bytes)
