"""What an optimizer step changes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.qwen3 import Qwen3, abstract_params, model_params
from jaxtrl.train.mesh import param_shardings, replicated


class TrainState(NamedTuple):
    """Number of updates, float32 parameters (nested dict), optimizer state. A pytree; steps take one and return one."""

    step: Int[Array, ""]
    params: Any
    opt_state: Any

    @classmethod
    def create(cls, model: Any, optimizer: optax.GradientTransformation) -> "TrainState":
        """Step 0 of a `Qwen3` or of its parameters, which are copied: steps may donate the state's buffers.

        Everything lies where the parameters lie; moments and other copies of the parameters are sharded as these are,
        the rest of the state is on all their devices. Traceable (jax.eval_shape).
        """
        params = model_params(model) if isinstance(model, Qwen3) else model

        def build(params):
            return cls(jnp.zeros((), jnp.int32), jax.tree.map(jnp.copy, params), optimizer.init(params))

        leaf = jax.tree.leaves(params)[0]
        if isinstance(leaf, jax.core.Tracer):
            return build(params)
        shardings = None
        if isinstance(leaf, jax.Array):
            own = jax.tree.map(lambda x: x.sharding, params)
            shardings = cls._make((everywhere(leaf), own, opt_state_shardings(params, optimizer)))
        return jax.jit(build, out_shardings=shardings)(params)  # one program: on Neuron each costs seconds to compile


def opt_state_shardings(params: Any, optimizer: optax.GradientTransformation) -> Any:
    """A pytree of shardings for `optimizer.init(params)`, from those of the arrays `params` (abstract ones too).

    What is of a parameter but has another shape (a row of second moments in Adafactor) is on every device.
    """
    state = jax.eval_shape(optimizer.init, params)
    rest = everywhere(jax.tree.leaves(params)[0])
    return optax.tree_utils.tree_map_params(
        optimizer,
        lambda leaf, param: param.sharding if leaf.shape == param.shape else rest,
        state,
        params,
        transform_non_params=lambda _: rest,
    )


def state_shardings(
    config: Qwen3Config, optimizer: optax.GradientTransformation, mesh: Mesh | None
) -> TrainState | None:
    """The sharding of each array of a `TrainState` of a model of `config`; None without a mesh."""
    if mesh is None:
        return None
    shapes = abstract_params(config)
    shardings = param_shardings(shapes, mesh)
    params = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
    whole = replicated(mesh)
    return TrainState(whole, shardings, opt_state_shardings(params, optimizer))  # type: ignore[arg-type]


def everywhere(leaf: Any) -> jax.sharding.Sharding:
    """The sharding of a small array that every device of the array `leaf` (an abstract one too) has."""
    if isinstance(leaf.sharding, NamedSharding):
        return NamedSharding(leaf.sharding.mesh, PartitionSpec())
    return leaf.sharding
