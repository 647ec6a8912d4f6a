import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.qwen3 import Qwen3, abstract_params, init_params
from jaxtrl.train.mesh import make_mesh, replicated
from jaxtrl.train.optimizer import make_optimizer
from jaxtrl.train.state import TrainState
from tests.fixture_t import CONFIG

CONFIG_T = Qwen3Config.from_dict(CONFIG)
OPTIMIZERS = {
    "adamw": make_optimizer(1e-3, 10),
    "optax adamw": optax.adamw(1e-3),
    "sgd": optax.sgd(1e-3),
    "adafactor": optax.adafactor(1e-3),
    "masked chain": optax.chain(optax.clip(1.0), optax.masked(optax.trace(0.9), lambda p: jax.tree.map(jnp.ndim, p))),
}


def test_from_model_and_from_params():
    model = Qwen3(CONFIG_T, rngs=nnx.Rngs(0))
    state = TrainState.create(model, OPTIMIZERS["adamw"])
    assert int(state.step) == 0
    assert state.step.dtype == jnp.int32
    np.testing.assert_array_equal(state.params["embed_tokens"], model.embed_tokens.get_value())
    again = TrainState.create(state.params, OPTIMIZERS["adamw"])
    assert jax.tree.structure(again) == jax.tree.structure(state)


def test_parameters_are_copied():
    """A step may donate the state; the model that it was made from stays usable."""
    model = Qwen3(CONFIG_T, rngs=nnx.Rngs(0))
    state = TrainState.create(model, OPTIMIZERS["sgd"])
    jax.tree.map(lambda x: x.delete(), state.params)
    assert np.isfinite(model.embed_tokens.get_value()).all()
    params = init_params(CONFIG_T, 0)
    state = TrainState.create(params, OPTIMIZERS["sgd"])
    params["embed_tokens"][:] = 7
    assert not np.any(np.asarray(state.params["embed_tokens"]) == 7)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_everything_is_on_the_mesh(name):
    mesh = make_mesh(2)
    params = jax.device_put(init_params(CONFIG_T, 0), replicated(mesh))
    state = TrainState.create(params, OPTIMIZERS[name])
    for leaf in jax.tree.leaves(state):
        assert leaf.sharding.device_set == set(mesh.devices.flat)


def test_moments_are_sharded_as_their_parameter():
    mesh = make_mesh(2)
    sharded = jax.NamedSharding(mesh, jax.P(("data",)))
    params = {"a": {"kernel": jax.device_put(np.zeros((4, 6), np.float32), sharded)}}
    state = TrainState.create(params, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))
    assert state.params["a"]["kernel"].sharding == sharded
    moments = optax.tree_utils.tree_get(state.opt_state, "mu")["a"]["kernel"]
    assert moments.sharding == sharded
    assert {shard.data.shape for shard in moments.addressable_shards} == {(2, 6)}
    assert state.opt_state[1][0].count.sharding == replicated(mesh)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_abstract(name):
    abstract = jax.eval_shape(lambda p: TrainState.create(p, OPTIMIZERS[name]), abstract_params(CONFIG_T))
    concrete = TrainState.create(init_params(CONFIG_T, 0), OPTIMIZERS[name])
    assert jax.tree.map(lambda x: (x.shape, x.dtype), abstract) == jax.tree.map(lambda x: (x.shape, x.dtype), concrete)
