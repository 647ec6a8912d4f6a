"""Programs: one compile per kind and shape, counted, also ahead; a mismatch is an error, no hidden compile."""

import threading
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from jaxtrl.train.compiled import Job, Programs


def test_one_program_per_kind_and_shape():
    seen = []
    programs = Programs(seen.append)
    f = jax.jit(lambda x: x.sum())
    g = jax.jit(lambda x: x.max())
    for size in (3, 4, 3, 4, 3):
        assert float(programs.call("sum", size, f, jnp.arange(float(size)))) == size * (size - 1) / 2
        assert float(programs.call("max", size, g, jnp.arange(float(size)))) == size - 1
    assert [(p.kind, p.shape) for p in programs.compiled] == [("sum", 3), ("max", 3), ("sum", 4), ("max", 4)]
    assert seen == programs.compiled
    assert programs.count == 4
    assert programs.seconds == sum(p.seconds for p in seen) > 0
    assert all(p.memory.total > 0 for p in seen)


def test_other_arguments_under_a_known_shape_are_an_error():
    programs = Programs()
    f = jax.jit(lambda x: x.sum())
    programs.call("sum", 3, f, jnp.ones(3))
    with pytest.raises(TypeError):
        programs.call("sum", 3, f, jnp.ones(4))
    with pytest.raises(TypeError):
        programs.call("sum", 3, f, jnp.ones(3, jnp.int32))
    assert programs.count == 1


def test_donation_reaches_the_executable():
    programs = Programs()
    f = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.ones(1000)
    y = programs.call("add", 1000, f, x)
    assert x.is_deleted()
    assert float(y[0]) == 2


class Sizes(NamedTuple):
    rows: int
    columns: int


def jobs(function, *shapes):
    return [Job("sum", shape, function, (jax.ShapeDtypeStruct(shape, jnp.float32),)) for shape in shapes]


@pytest.mark.parametrize("wait", [True, False])
def test_warm_up_compiles_what_is_foreseen_and_nothing_is_compiled_again(wait):
    threads, seen = set(), []

    def traced(x):
        threads.add(threading.current_thread().name)
        return (x @ x.T).sum()

    function, shapes = jax.jit(traced), [Sizes(2, 3), Sizes(3, 3), Sizes(4, 5)]
    programs = Programs(lambda program: seen.append((program, threading.current_thread().name)))
    programs.foresee(jobs(function, *shapes))
    programs.foresee(jobs(function, shapes[0]))
    assert programs.foreseen == [("sum", shape) for shape in shapes]
    programs.warm_up(wait)
    if wait:
        assert programs.count == 3
        assert programs.waited == 0
    for shape in [*shapes, *shapes]:
        assert float(programs.call("sum", shape, function, jnp.ones(shape))) == shape.rows**2 * shape.columns
    programs.close()
    assert programs.count == 3
    assert programs.calls == {("sum", shape): 2 for shape in shapes}
    assert {thread for _, thread in seen} == {"MainThread"}
    assert all(program.was_foreseen and program.seconds > 0 for program, _ in seen)
    if wait:
        assert all(name.startswith("compile") for name in threads)
    programs.warm_up()  # nothing left to do
    assert programs.count == 3


def test_in_the_background_a_step_waits_for_its_own_program_only():
    """With every thread busy the caller compiles by itself; with one that compiles it, it waits for that."""
    begun, go = threading.Event(), threading.Event()

    def slow(x):
        begun.set()
        go.wait(30)
        return x.sum()

    programs = Programs()
    blocked, other = Sizes(5, 5), Sizes(6, 6)
    slow_jit, quick = jax.jit(slow), jax.jit(lambda x: x.max())
    programs.foresee([*jobs(slow_jit, blocked), *jobs(quick, *(Sizes(n, 1) for n in range(1, 9)), other)])
    programs.warm_up(wait=False)
    begun.wait(30)
    assert float(programs.call("sum", other, quick, jnp.ones(other))) == 1
    assert programs.count < 10
    threading.Timer(0.3, go.set).start()
    assert float(programs.call("sum", blocked, slow_jit, jnp.ones(blocked))) == 25
    (program,) = [program for program in programs.compiled if program.shape == blocked]
    assert program.seconds >= program.waited > 0.05
    programs.close()


def test_a_failed_compile_is_not_kept():
    attempts = []

    def fails(x):
        attempts.append(threading.current_thread().name)
        if len(attempts) < 3:
            raise RuntimeError("out of memory")
        return x.sum()

    function, shape = jax.jit(fails), Sizes(2, 2)
    programs = Programs()
    programs.foresee(jobs(function, shape))
    with pytest.raises(RuntimeError, match="out of memory"):
        programs.warm_up()
    assert programs.count == 0
    programs.warm_up(wait=False)
    programs._pending["sum", shape].exception()  # ended
    assert float(programs.call("sum", shape, function, jnp.ones(shape))) == 4
    assert len(attempts) == 3
    assert programs.count == 1

    def always_fails(x):
        raise RuntimeError("never")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="never"):
            programs.call("max", shape, jax.jit(always_fails), jnp.ones(shape))
    assert programs.count == 1


def test_a_program_that_was_not_foreseen_is_a_warning_that_names_the_size():
    function = jax.jit(lambda x: x.sum())
    programs = Programs()
    programs.foresee(jobs(function, Sizes(2, 3), Sizes(7, 8)))
    with pytest.warns(UserWarning, match=r"sum program .* not foreseen: columns is 9 instead of 8 .*rows=7, columns=8"):
        programs.call("sum", Sizes(7, 9), function, jnp.ones((7, 9)))
    programs.call("sum", Sizes(7, 9), function, jnp.ones((7, 9)))  # once only
    programs.call("sum", Sizes(2, 3), function, jnp.ones((2, 3)))
    programs.call("max", Sizes(1, 1), function, jnp.ones((1, 1)))  # nothing of its kind was foreseen
    assert [program.was_foreseen for program in programs.compiled] == [False, True, True]
    assert programs.metrics()["programs_unforeseen"] == 1


def test_metrics_of_a_program():
    programs = Programs()
    programs.call("sum", Sizes(4, 2), jax.jit(lambda x: x @ x.T), jnp.ones((4, 2)))
    metrics = programs.compiled[0].metrics()
    assert (metrics["program"], metrics["program_rows"], metrics["program_columns"]) == ("sum", 4, 2)
    assert metrics["program_arguments_bytes"] == 4 * 2 * 4
    assert metrics["program_outputs_bytes"] == 4 * 4 * 4
    assert metrics["program_seconds"] == metrics["program_waited"] > 0
    assert programs.metrics() == {
        "programs": 1,
        "programs_from_cache": programs.from_cache,
        "programs_unforeseen": 0,
        "compile_seconds": programs.seconds,
    }
