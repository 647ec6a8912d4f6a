"""Lint for Neuron: each planted operation is found, with its source line; the step programs have none."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from jaxtrl.hardware.neuron import as_on_neuron, lint
from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.qwen3 import abstract_params
from jaxtrl.rows.batch import Sample, concat_rows, make_batch
from jaxtrl.rows.ladder import ShapeClass
from jaxtrl.train.mesh import make_mesh
from jaxtrl.train.optimizer import make_optimizer
from jaxtrl.train.state import TrainState
from jaxtrl.train.step import make_eval_step, make_score_step, make_sft_step
from tests.fixture_t import CONFIG

X = jax.ShapeDtypeStruct((4, 64), jnp.float32)
I = jax.ShapeDtypeStruct((4,), jnp.int32)  # noqa: E741


def found(function, *args):
    return [finding.operation for finding in lint(jax.jit(function), *args)]


def printing(x):
    jax.debug.print("{}", x.sum())
    return x


def multi_steps(x):
    optimizer = optax.MultiSteps(optax.sgd(0.1), 2)
    return optimizer.update(x, optimizer.init(x), x)[0]


def skipping(x):
    optimizer = optax.apply_if_finite(optax.sgd(0.1), 3)
    return optimizer.update(x, optimizer.init(x), x)[0]


def while_loop(x):
    return lax.while_loop(lambda c: c.sum() < 10, lambda c: c + 1, x)


def fori_loop(x, i):
    return lax.fori_loop(0, i[0], lambda _, c: c + 1, x)


def over_vocabulary(x, i):
    return jnp.take_along_axis(x, i[:, None], axis=1)


PLANTED = {
    "sort": (lambda x: jnp.sort(x), (X,), "sort"),
    "argsort": (lambda x: jnp.argsort(x), (X,), "sort"),
    "cond": (lambda x: lax.cond(x.sum() > 0, lambda: x, lambda: -x), (X,), "cond"),
    "switch": (lambda x, i: lax.switch(i[0], [lambda: x, lambda: -x, lambda: 2 * x]), (X, I), "cond"),
    "while_loop": (while_loop, (X,), "while"),
    "fori_loop with a traced bound": (fori_loop, (X, I), "while"),
    "top_k": (lambda x: lax.top_k(x, 3)[0], (X,), "top_k"),
    "cumsum": (lambda x: jnp.cumsum(x, axis=1), (X,), "cumsum"),
    "take_along_axis": (over_vocabulary, (X, I), "gather of single elements"),
    "gradient of take_along_axis": (
        jax.grad(lambda x, i: over_vocabulary(x, i).sum()),
        (X, I),
        "scatter-add of single elements",
    ),
    "gradient of a gather of scalars": (
        jax.grad(lambda x, i: x[i].sum()),
        (jax.ShapeDtypeStruct((64,), jnp.float32), I),
        "scatter-add of single elements",
    ),
    "scatter": (lambda x, i: x.at[i].set(0.0), (X, I), "scatter"),
    "integer scatter-add": (lambda x, i: x.astype(jnp.int32).at[i].add(1), (X, I), "scatter-add of integers"),
    "debug.print": (printing, (X,), "debug_print"),
    "pure_callback": (lambda x: jax.pure_callback(lambda y: np.asarray(y), X, x), (X,), "pure_callback"),
    "MultiSteps": (multi_steps, (X,), "cond"),
    "apply_if_finite": (skipping, (X,), "cond"),
    "integer dot": (lambda i: i @ i, (I,), "integer dot_general"),
    "minus infinity": (lambda x: jnp.where(x > 0, x, -jnp.inf), (X,), "minus infinity"),
    "reduce_precision": (lambda x: lax.reduce_precision(x, 8, 7), (X,), "reduce_precision"),
    "complex": (lambda x: jnp.fft.fft(x).real, (X,), "complex64 array"),
    "float8": (lambda x: x.astype(jnp.float8_e4m3fn).astype(jnp.float32), (X,), "float8_e4m3fn array"),
    "threefry": (lambda x: x + jax.random.normal(jax.random.key(0), x.shape), (X,), "random_bits"),
    "bfloat16 cos": (lambda x: jnp.cos(x.astype(jnp.bfloat16)), (X,), "bfloat16 cos"),
    "variadic reduce": (
        lambda x: lax.reduce((x, x), (0.0, 0.0), lambda a, b: (a[0] + b[0], a[1] * b[1]), (1,)),
        (X,),
        "variadic reduce",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_operation_is_found_with_its_line(name):
    function, args, operation = PLANTED[name]
    findings = lint(jax.jit(function), *args)
    (source, *_) = [finding.source for finding in findings if finding.operation == operation]
    assert ".py:" in source


@pytest.mark.parametrize("name", ["sort", "cumsum", "take_along_axis", "debug.print", "cond"])
def test_the_line_is_that_of_the_user(name):
    function, args, _ = PLANTED[name]
    assert any("test_neuron.py:" in finding.source for finding in lint(jax.jit(function), *args))


def test_code_under_the_lint_is_told_that_it_is_on_neuron():
    with as_on_neuron():
        assert jax.default_backend() == "neuron"
    assert jax.default_backend() == "cpu"


@pytest.mark.parametrize("name", ["sort", "cond", "cumsum"])
def test_planted_operation_is_found_inside_loops(name):
    function, args, operation = PLANTED[name]
    layer = jax.checkpoint(jax.jit(function))
    assert operation in found(lambda x: lax.scan(lambda c, _: (layer(c), None), x, length=3)[0], *args)


def test_integer_psum():
    mesh = make_mesh(2)

    def count(x):
        total = jax.shard_map(
            lambda y: lax.psum((y > 0).sum(), "data"),
            mesh=mesh,
            in_specs=PartitionSpec("data"),
            out_specs=PartitionSpec(),
        )
        return total(x)

    assert found(count, X) == ["integer psum_invariant"]


def test_finding_names_the_source_line():
    (finding,) = lint(jax.jit(while_loop), X)
    assert "test_neuron.py:" in finding.source
    assert "while_loop" in finding.source
    assert str(finding).endswith("while: use lax.scan with a static length")


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (lambda x: lax.scan(lambda c, _: (c + 1, None), x, length=5)[0], (X,)),
        (lambda x: lax.fori_loop(0, 5, lambda _, c: c + 1, x), (X,)),
        (lambda x: jnp.argmax(x, axis=1), (X,)),
        (lambda x: jax.nn.softmax(x) + jax.nn.logsumexp(x, axis=1, keepdims=True), (X,)),
        (jax.grad(lambda x, i: x[i].sum()), (X, I)),  # whole rows
        (lambda x, i: lax.dynamic_update_slice(x, x[:1], (i[0], 0)), (X, I)),
    ],
    ids=["scan", "static fori_loop", "argmax", "softmax", "row scatter-add", "dynamic_update_slice"],
)
def test_allowed_operations_pass(function, args):
    assert found(function, *args) == []


CONFIG_T = Qwen3Config.from_dict(CONFIG)


def batch(devices):
    sample = Sample(np.arange(12, dtype=np.int32), np.ones(12, bool))
    row = concat_rows([sample, sample])
    return make_batch([row] * devices, ShapeClass(32, 32, 32, 6), 8)


@pytest.mark.parametrize("mesh", [None, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_train_steps_are_clean(loss_type, dtype, mesh):
    optimizer = make_optimizer(1e-3, 10, weight_decay=0.1)
    step = make_sft_step(CONFIG_T, optimizer, mesh and make_mesh(mesh), loss_type=loss_type, dtype=jnp.dtype(dtype))
    params = abstract_params(CONFIG_T)
    state = jax.eval_shape(lambda p: TrainState.create(p, optimizer), params)
    acc = jax.eval_shape(step.init, params)
    assert lint(step.fused, state, batch(mesh or 1)) == []
    assert lint(step.accumulate, params, acc, batch(mesh or 1)) == []
    assert lint(step.apply, state, acc) == []


@pytest.mark.parametrize("make", [make_eval_step, make_score_step])
def test_eval_and_score_steps_are_clean(make):
    assert lint(make(CONFIG_T), abstract_params(CONFIG_T), batch(1)) == []
    assert lint(make(CONFIG_T, make_mesh(2)), abstract_params(CONFIG_T), batch(2)) == []
