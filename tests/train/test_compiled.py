"""Programs: one compile per kind and shape, counted; a mismatch is an error instead of a hidden compile."""

import jax
import jax.numpy as jnp
import pytest

from jaxtrl.train.compiled import Programs


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
    assert all(p.memory_bytes > 0 for p in seen)


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
