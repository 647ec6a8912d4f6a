"""Steps on every kind of mesh give what one device gives, and no device holds the whole of what is cut."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.qwen3 import init_params
from jaxtrl.rows.batch import Sample, ShapeClass, concat_rows, make_batch
from jaxtrl.rows.tree import tree_row
from jaxtrl.train.grpo import make_grpo_step
from jaxtrl.train.mesh import make_mesh, param_shardings, row_count
from jaxtrl.train.optimizer import global_norm
from jaxtrl.train.state import TrainState
from jaxtrl.train.step import make_eval_step, make_score_step, make_sft_step

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}
# Gradients are clipped (their norm is above 1) and momentum is kept: both are of the whole model, on cut arrays.
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(1.0, momentum=0.9))
SHAPE = ShapeClass(32, 24, 24, 8)


def make_row(rng, tokens, trained):
    ids = rng.integers(0, SIZES["vocab_size"], tokens).astype(np.int32)
    return concat_rows([Sample(ids, np.arange(tokens) >= tokens - trained)])


RNG = np.random.default_rng(0)
LENGTHS = [(20, 10), (1, 0), (31, 22), (8, 8), (12, 1), (5, 0), (18, 17), (2, 1)]  # two rows without a trained token
ROWS = [make_row(RNG, tokens, trained) for tokens, trained in LENGTHS]


@lru_cache
def make_config(tied):
    return Qwen3Config(**SIZES, **HEADS, tie_word_embeddings=tied, attention_bias=tied, initializer_range=0.2)


@lru_cache
def make_params(tied):
    """Biases and scales that are not zero and one."""
    noise = np.random.default_rng(1)
    params = init_params(make_config(tied), 0)
    return jax.tree.map(lambda x: x + 0.1 * noise.standard_normal(x.shape).astype(np.float32), params)


@lru_cache
def run(sizes, tied, rows=8, dtype="float32", steps=2):
    """Metrics, parameters, evaluation and scores after optimizer steps on so many rows, as many at once as the mesh has
    devices for."""
    mesh = None if sizes is None else make_mesh(*sizes)
    config, params = make_config(tied), make_params(tied)
    shardings = param_shardings(params, mesh)
    step = make_sft_step(config, OPTIMIZER, mesh, dtype=jnp.dtype(dtype))
    state = TrainState.create(params if mesh is None else jax.device_put(params, shardings), OPTIMIZER)
    devices = row_count(mesh)
    batches = [make_batch(ROWS[i : i + devices], SHAPE, 8) for i in range(0, rows, devices)]
    all_metrics = []
    for _ in range(steps):
        state, metrics = step(state, *batches)
        all_metrics.append(metrics)
    evaluate, score = make_eval_step(config, mesh), make_score_step(config, mesh, temperature=0.7)
    sums = [evaluate(state.params, batch) for batch in batches]
    scores = [score(state.params, batch) for batch in batches]
    return jax.device_get(
        {
            "metrics": all_metrics,
            "params": state.params,
            "momentum": optax.tree_utils.tree_get(state.opt_state, "trace"),
            "evaluated": jax.tree.map(lambda *values: sum(values), *sums),
            "logp": np.concatenate([logp for logp, _ in scores]),
            "entropy": np.concatenate([entropy for _, entropy in scores]),
        }
    )


MESHES = [
    *(((1, 2, 1), tied) for tied in (True, False)),
    *(((1, 1, 2), tied) for tied in (True, False)),
    *((sizes, True) for sizes in [(2, 1, 1), (1, 4, 1), (1, 1, 4), (2, 1, 2), (1, 2, 2)]),
    *((sizes, False) for sizes in [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 1)]),
]


def assert_equal(found, expected):
    assert expected["metrics"][0]["grad_norm"] > 1
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), found, expected)


def test_mixed_mesh_equals_one_device():
    assert_equal(run((2, 2, 2), False, rows=4), run(None, False, rows=4))


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "tied"), MESHES)
def test_equals_one_device(sizes, tied):
    assert_equal(run(sizes, tied), run(None, tied))


@lru_cache
def run_grpo(sizes):
    """Metrics and parameters of one GRPO step on tree rows of two completions each."""
    mesh = None if sizes is None else make_mesh(*sizes)
    rng, rows = np.random.default_rng(2), []
    for advantage in (1.0, -0.5, 0.7, 0.0):
        ids = [rng.integers(0, SIZES["vocab_size"], 6).astype(np.int32) for _ in range(3)]
        ids = [np.concatenate([ids[0], end]) for end in ids[1:]]  # one prompt
        options = {"loss_mask": np.arange(12) > 5, "old_logp": np.full(12, -4.5, np.float32)}
        rows.append(tree_row([Sample(x, advantage=a, **options) for x, a in zip(ids, (advantage, -0.3), strict=True)]))
    step, params = make_grpo_step(make_config(False), OPTIMIZER, mesh, beta=0.0), make_params(False)
    devices = row_count(mesh)
    batches = [make_batch(rows[i : i + devices], SHAPE, 8) for i in range(0, len(rows), devices)]
    state = TrainState.create(
        params if mesh is None else jax.device_put(params, param_shardings(params, mesh)), OPTIMIZER
    )
    state, metrics = step(state, *batches)
    return jax.device_get({"metrics": metrics, "params": state.params})


@pytest.mark.slow
def test_grpo_on_a_mixed_mesh_equals_one_device():
    found, expected = run_grpo((2, 2, 2)), run_grpo(None)
    assert expected["metrics"]["grad_norm"] > 0.01
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), found, expected)


@pytest.mark.slow
def test_bfloat16_on_a_mesh():
    """Gathered in bfloat16: as near to float32 as one device is."""
    exact = run(None, True, steps=1)["params"]
    near, found = (run(sizes, True, dtype="bfloat16", steps=1)["params"] for sizes in (None, (2, 2, 2)))
    distance = lambda tree: global_norm(jax.tree.map(np.subtract, tree, exact))  # noqa: E731
    assert 0 < distance(found) < 1.5 * distance(near)


def test_gradients_are_added_up_where_they_are_cut():
    """The step's arrays, before and after: each device has a part of every matrix, of its moments and gradients."""
    mesh = make_mesh(1, 2, 2)
    shardings = param_shardings(make_params(True), mesh)
    step = make_sft_step(make_config(True), OPTIMIZER, mesh)
    params = jax.device_put(make_params(True), shardings)
    acc = step.init(params)
    for tree in (params, acc.gradients, TrainState.create(params, OPTIMIZER).opt_state[1][0].trace):
        kernel, table = tree["layers"]["mlp"]["down_proj"]["kernel"], tree["embed_tokens"]
        assert {shard.data.shape for shard in kernel.addressable_shards} == {(2, 24, 16)}
        assert {shard.data.shape for shard in table.addressable_shards} == {(48, 16)}


def test_refused():
    config = Qwen3Config(**SIZES, num_attention_heads=8, num_key_value_heads=2)
    message = "mesh axis tensor is 4, but the model's num_key_value_heads is 2: set tensor to a divisor of it"
    for make in (lambda mesh: make_sft_step(config, OPTIMIZER, mesh), lambda mesh: make_eval_step(config, mesh)):
        with pytest.raises(ValueError, match=message):
            make(make_mesh(2, 1, 4))
