"""What a layer keeps for its backward pass: named policies of `jax.checkpoint`, and the naming of what they keep."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

# Besides a layer's input, "full" keeps nothing and "matmuls" what is named: the outputs of the layer's matmuls
# ("projection") and the attention's output and log-sum-exp ("attention", named inside its own VJP). So "matmuls"
# repeats elementwise work only. Names, not `dots_saveable`: that would keep the score blocks of the attention as well.
REMAT_POLICIES: dict[str, Callable[..., bool]] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "matmuls": jax.checkpoint_policies.save_only_these_names("projection", "attention"),
}
_INTEGERS = {4: jnp.int32, 2: jnp.int16}


def keep_residual(x: Float[Array, "..."], name: str) -> Float[Array, "..."]:
    """`keep` for the forward rule of a custom VJP, where nothing differentiates it.

    `jax.checkpoint` does not look for names inside a `custom_jvp`, so `keep` would not be found there.
    """
    kept = checkpoint_name(lax.bitcast_convert_type(x, _INTEGERS[x.dtype.itemsize]), name)
    return lax.bitcast_convert_type(kept, x.dtype)


_keep = jax.custom_jvp(keep_residual, nondiff_argnums=(1,))
_keep.defjvp(lambda name, primals, tangents: (keep_residual(primals[0], name), tangents[0]))


def keep(x: Float[Array, "..."], name: str) -> Float[Array, "..."]:
    """`x` (float32 or bfloat16), kept for the backward pass under policies that save `name`; as `checkpoint_name`.

    What is kept has the type of an integer with the same bits: on each float that it saves, `jax.checkpoint` puts a
    `reduce_precision`, which Neuron does not have. XLA removes the pair of conversions.
    """
    return _keep(x, name)
