"""How parameters are cut over devices, and how they are put together again where they are used (DESIGN.md section 7).

One rule: the mesh axis "fsdp" cuts the axis of length hidden_size of every matrix, "tensor" its other one (heads, MLP
columns, vocabulary). Norm scales and the bias of o_proj are small and whole everywhere; biases of heads are cut as the
heads are. So a layer is gathered over "fsdp" by one all-gather per matrix, whose gradient is a reduce-scatter (ZeRO-3,
https://arxiv.org/abs/1910.02054), and a block of vocabulary rows likewise; what remains is cut as in Megatron-LM
(https://arxiv.org/abs/1909.08053). Everything here but the specs runs inside `jax.shard_map`.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxtrl.model.config import Qwen3Config

SUMMED = ("o_proj", "down_proj")  # their inputs are spread over "tensor", so that their outputs have to be added up
CUT_SIZES = {
    "fsdp": ("hidden_size",),
    "tensor": ("num_key_value_heads", "num_attention_heads", "intermediate_size", "vocab_size"),
}
TABLES = ("embed_tokens", "lm_head")


class Shards(NamedTuple):
    """Into how many parts the mesh axes "fsdp" and "tensor" cut the parameters."""

    fsdp: int = 1
    tensor: int = 1

    @classmethod
    def of(cls, config: Qwen3Config, params: Any) -> "Shards":
        """Those of a device's parameters of a model of `config`."""
        vocab, hidden = params["embed_tokens"].shape
        return cls(config.hidden_size // hidden, config.vocab_size // vocab)

    def check(self, config: Qwen3Config) -> None:
        """Raises ValueError where a model of `config` cannot be cut so."""
        for axis, names in CUT_SIZES.items():
            parts = getattr(self, axis)
            for name in names:
                if getattr(config, name) % parts:
                    raise ValueError(
                        f"mesh axis {axis} is {parts}, but the model's {name} is {getattr(config, name)}: "
                        f"set {axis} to a divisor of it"
                    )


def param_specs(params: Any, shards: Shards) -> Any:
    """The `PartitionSpec` of each parameter (a nested dict, whole or not), by the names in its path."""

    def spec(path, leaf):
        cuts = _cuts(path)
        names = [
            axis if axis and getattr(shards, axis) > 1 else None for axis in (None,) * (leaf.ndim - len(cuts)) + cuts
        ]
        return PartitionSpec(*names) if any(names) else PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, params)


def _cuts(path: tuple) -> tuple[str | None, ...]:
    """The mesh axes that cut a parameter's last axes."""
    *_, module, kind = ("", *(key.key for key in path if hasattr(key, "key")))
    if kind in TABLES or (kind == "kernel" and module in SUMMED):
        return "tensor", "fsdp"
    if kind == "kernel":
        return "fsdp", "tensor"
    return ("tensor",) if kind == "bias" and module not in SUMMED else (None,)


def place(tree: Any, shardings: Any) -> Any:
    """`tree` cut by `shardings`, a pytree like it; what lies so already is not copied.

    Where shardings reach over processes, each process has the whole tree and takes its devices' parts of it.
    """

    def place_leaf(leaf, sharding):
        if sharding.is_fully_addressable or (isinstance(leaf, jax.Array) and leaf.sharding == sharding):
            return jax.device_put(leaf, sharding)
        whole = np.asarray(leaf)
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    return jax.tree.map(place_leaf, tree, shardings)


def is_shared(params: Any) -> bool:
    """Whether other processes have parts or copies of the arrays."""
    return any(isinstance(leaf, jax.Array) and not leaf.is_fully_addressable for leaf in jax.tree.leaves(params))


def on_host(leaf: Any, layer: int | None = None) -> np.ndarray:
    """A parameter, or one of its stacked layers, as a whole; one that is cut is put together layer by layer.

    Every process that has parts of it has to call this.
    """
    if not isinstance(leaf, jax.Array) or leaf.is_fully_replicated or (layer is None and leaf.is_fully_addressable):
        whole = np.asarray(leaf)  # the whole leaf: indexing a device array would compile a program
        return whole if layer is None else whole[layer]
    cut: Any = leaf.sharding
    everywhere = NamedSharding(cut.mesh, PartitionSpec())
    if layer is None:
        return np.asarray(jax.jit(jnp.copy, out_shardings=everywhere)(leaf))
    return np.asarray(jax.jit(_take_layer, out_shardings=everywhere)(leaf, layer))


def _take_layer(stacked: Array, layer: int | Array) -> Array:
    return lax.dynamic_index_in_dim(stacked, layer, keepdims=False)


def gather_layer(layer: Any, shards: Shards, dtype: DTypeLike) -> Any:
    """A layer's matrices in `dtype`, whole but for what "tensor" cuts; other parameters as they are."""
    if shards.fsdp == 1:
        return layer

    def gather(path, leaf):
        cuts = _cuts(path)
        return _gather(leaf, cuts.index("fsdp"), dtype, leaf.dtype) if "fsdp" in cuts else leaf

    return jax.tree_util.tree_map_with_path(gather, layer)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(shard: Array, axis: int, dtype: DTypeLike, own: DTypeLike) -> Array:
    """Sent in the compute dtype; the gradient is summed in the parameter's own."""
    return gather(shard.astype(dtype), axis)


def _gather_backward(axis, dtype, own, _, cotangent):
    return (lax.psum_scatter(cotangent.astype(own), "fsdp", scatter_dimension=axis, tiled=True),)


_gather.defvjp(lambda shard, axis, dtype, own: (gather(shard.astype(dtype), axis), None), _gather_backward)


def gather(shard: Array, axis: int) -> Array:
    """The parts of all "fsdp" devices, one after the other along `axis`."""
    return lax.all_gather(shard, "fsdp", axis=axis, tiled=True)


def own_ids(table: Float[Array, "vocab d"], ids: Int[Array, "n"], shards: Shards) -> Int[Array, "n"]:
    """`ids` counted from the first row of this device's part of the table; outside of [0, vocab) those it lacks."""
    return ids if shards.tensor == 1 else ids - lax.axis_index("tensor") * table.shape[0]


def take_rows(
    table: Float[Array, "vocab d"], ids: Int[Array, "n"], shards: Shards, dtype: DTypeLike
) -> Float[Array, "n hidden"]:
    """table[ids] in `dtype` from a table that is cut: whole rows, zero for those that other "tensor" devices have.

    Each device looks up its columns for the ids of all "fsdp" devices, and they exchange them: no device ever holds
    the table. `ids` must be in the vocabulary.
    """
    ids = own_ids(table, ids, shards)
    if shards.fsdp > 1:
        ids = gather(ids[None], 0)
    rows = table[jnp.clip(ids, 0, table.shape[0] - 1)].astype(dtype)
    if shards.tensor > 1:
        rows = jnp.where((ids == jnp.clip(ids, 0, table.shape[0] - 1))[..., None], rows, 0)
    return lax.all_to_all(rows, "fsdp", 0, 2, tiled=True)[0] if shards.fsdp > 1 else rows


def add_rows(
    table: Float[Array, "vocab d"], ids: Int[Array, "n"], rows: Float[Array, "n hidden"], shards: Shards
) -> Float[Array, "vocab d"]:
    """`table.at[ids].add(rows)` for a table that is cut: the transpose of `take_rows`."""
    ids = own_ids(table, ids, shards)
    if shards.fsdp > 1:
        ids, rows = gather(ids[None], 0), lax.all_to_all(rows[None], "fsdp", 2, 0, tiled=True)
    inside = jnp.clip(ids, 0, table.shape[0] - 1)
    if shards.tensor > 1:
        rows = jnp.where((ids == inside)[..., None], rows, 0)
    return table.at[inside].add(rows)


def sum_over_tensor(x: Array) -> Array:
    """The sum of the parts of all "tensor" devices, where `x` differs between them."""
    return lax.psum(x, "tensor") if "tensor" in varying_axes(x) else x


def varying_axes(tree: Any) -> frozenset[str]:
    """The mesh axes over which any leaf of `tree` varies; empty outside `jax.shard_map`."""
    return frozenset().union(*(jax.typeof(leaf).mat.varying for leaf in jax.tree.leaves(tree)))


def vary(tree: Any, axes: frozenset[str]) -> Any:
    """`tree` with every leaf cast to vary over `axes` (as loop carries must). The cast's gradient is a psum."""

    def cast(leaf):
        missing = axes - jax.typeof(leaf).mat.varying
        return lax.pcast(leaf, tuple(sorted(missing)), to="varying") if missing else leaf

    return jax.tree.map(cast, tree)
