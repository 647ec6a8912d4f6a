"""The Qwen3 decoder (https://arxiv.org/abs/2505.09388) over one token row, in Flax NNX with stacked layers."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxtrl.model.attention import attend
from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.remat import REMAT_POLICIES, keep
from jaxtrl.model.rope import rope_tables, rotate
from jaxtrl.model.sharding import Shards, gather_layer, sum_over_tensor, take_rows, vary, varying_axes
from jaxtrl.rows.blocks import BlockTables

Normal = Callable[[tuple[int, ...]], Array]  # draws the initial weights of a shape


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale over the last axis, in float32 (https://arxiv.org/abs/1910.07467)."""

    def __init__(self, shape: tuple[int, ...], eps: float):
        self.eps = eps
        self.scale = nnx.Param(jnp.asarray(np.ones(shape, np.float32)))

    def __call__(self, x: Float[Array, "*n d"], dtype: DTypeLike) -> Float[Array, "*n d"]:
        x = x.astype(jnp.float32)
        x = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return (x * self.scale.get_value()).astype(dtype)


class Linear(nnx.Module):
    """x @ kernel (+ bias), kernel [in, out] float32, computed in the dtype of x.

    Under tensor parallelism a device has some of the outputs or, where they are `summed`, some of the inputs.
    """

    def __init__(self, shape: tuple[int, ...], bias: bool, normal: Normal, summed: bool = False):
        self.summed = summed
        self.kernel = nnx.Param(normal(shape))
        self.bias = nnx.Param(jnp.asarray(np.zeros((*shape[:-2], shape[-1]), np.float32))) if bias else None

    def __call__(self, x: Float[Array, "n i"]) -> Float[Array, "n o"]:
        y = x @ self.kernel.get_value().astype(x.dtype)
        if self.summed:
            y = sum_over_tensor(y)
        return y if self.bias is None else y + self.bias.get_value().astype(x.dtype)


def _for_each_shard(x: Array, linear: Linear) -> Array:
    """`x` for a layer that is cut over "tensor": cast once, so that the gradients of its shards are added up once."""
    return vary(x, varying_axes(linear.kernel.get_value()))


class Attention(nnx.Module):
    """Grouped-query attention with RMS-normalised queries and keys; `attention(q, k, v)` is given by the caller."""

    def __init__(self, config: Qwen3Config, normal: Normal, linear: type[Linear] = Linear):
        layers, hidden, d = config.num_hidden_layers, config.hidden_size, config.head_dim
        queries, keys, bias = config.num_attention_heads * d, config.num_key_value_heads * d, config.attention_bias
        self.head_dim = d
        self.q_proj = linear((layers, hidden, queries), bias, normal)
        self.k_proj = linear((layers, hidden, keys), bias, normal)
        self.v_proj = linear((layers, hidden, keys), bias, normal)
        self.o_proj = linear((layers, queries, hidden), bias, normal, summed=True)
        self.q_norm = RMSNorm((layers, d), config.rms_norm_eps)
        self.k_norm = RMSNorm((layers, d), config.rms_norm_eps)

    def __call__(self, x: Float[Array, "n d"], cos: Array, sin: Array, attention: Callable) -> Float[Array, "n d"]:
        x = _for_each_shard(x, self.q_proj)
        q, k, v = (
            keep(project(x), "projection").reshape(x.shape[0], -1, self.head_dim)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        # Norm and rotation stay float32 together: one fused elementwise pass, rounded once.
        q = rotate(self.q_norm(q, jnp.float32), cos, sin).astype(x.dtype)
        k = rotate(self.k_norm(k, jnp.float32), cos, sin).astype(x.dtype)
        return keep(self.o_proj(attention(q, k, v).reshape(x.shape[0], -1)), "projection")


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)) (SwiGLU, https://arxiv.org/abs/2002.05202)."""

    def __init__(self, config: Qwen3Config, normal: Normal, linear: type[Linear] = Linear):
        layers, hidden, inner = config.num_hidden_layers, config.hidden_size, config.intermediate_size
        self.gate_proj = linear((layers, hidden, inner), False, normal)
        self.up_proj = linear((layers, hidden, inner), False, normal)
        self.down_proj = linear((layers, inner, hidden), False, normal, summed=True)

    def __call__(self, x: Float[Array, "n d"]) -> Float[Array, "n d"]:
        x = _for_each_shard(x, self.gate_proj)
        gate = keep(self.gate_proj(x), "projection")
        up = keep(self.up_proj(x), "projection")
        return self.down_proj(nnx.silu(gate) * up)


class DecoderLayer(nnx.Module):
    """Attention and MLP, each on the normalised residual stream. Training and decoding differ in `attention` only.

    The constructor stacks the parameters of all L layers on axis 0; the call takes a module that holds one slice.
    `linear` is the class of its linear maps.
    """

    def __init__(self, config: Qwen3Config, normal: Normal, linear: type[Linear] = Linear):
        scales = (config.num_hidden_layers, config.hidden_size)
        self.input_layernorm = RMSNorm(scales, config.rms_norm_eps)
        self.self_attn = Attention(config, normal, linear)
        self.post_attention_layernorm = RMSNorm(scales, config.rms_norm_eps)
        self.mlp = MLP(config, normal, linear)

    def __call__(self, x: Float[Array, "n d"], cos: Array, sin: Array, attention: Callable) -> Float[Array, "n d"]:
        x = x + self.self_attn(self.input_layernorm(x, x.dtype), cos, sin, attention)
        return x + self.mlp(self.post_attention_layernorm(x, x.dtype))


class Qwen3(nnx.Module):
    """A dense Qwen3 decoder with float32 parameters; those of its layers are stacked on a leading axis of length L.

    `Qwen3(config, rngs=nnx.Rngs(0))` has random weights (normal, `initializer_range`), `load_pretrained` a
    checkpoint's.
    """

    def __init__(self, config: Qwen3Config, *, rngs: nnx.Rngs):
        normal, table = _normal(rngs, config.initializer_range), (config.vocab_size, config.hidden_size)
        self.config = config
        self.embed_tokens = nnx.Param(normal(table))
        self.layers = DecoderLayer(config, normal)
        self.norm = RMSNorm((config.hidden_size,), config.rms_norm_eps)
        self.lm_head = None if config.tie_word_embeddings else nnx.Param(normal(table))

    def head_weight(self) -> Float[Array, "vocab d"]:
        """The weight of the LM head: the embedding where the two are tied, so that its gradient has both parts."""
        return jnp.asarray((self.embed_tokens if self.lm_head is None else self.lm_head).get_value())

    def __call__(
        self,
        input_ids: Int[Array, "n"] | Int[np.ndarray, "n"],
        position_ids: Int[Array, "n"] | Int[np.ndarray, "n"],
        visible_until: Int[Array, "n"] | Int[np.ndarray, "n"],
        tables: BlockTables,
        *,
        dtype: DTypeLike = jnp.float32,
        remat: str = "full",
        unroll: int = 1,
        shards: Shards = Shards(),
    ) -> Float[Array, "n d"]:
        """Hidden states after the final norm, in `dtype`, which every matmul computes in.

        `remat` says what a layer keeps for the backward pass: "full" recomputes all from its input, "matmuls" keeps
        the matmul and attention outputs. `unroll` layers are one step of the layer loop. `shards`: how the parameters
        are cut (inside `jax.shard_map`). Raises ValueError for another
        `remat` and, where the ids are known (outside jit), for an id that is not in the vocabulary; inside jit, where
        nothing can be raised, such an id makes the row NaN rather than some other token.
        """
        if remat not in REMAT_POLICIES:
            raise ValueError(f"remat must be one of {', '.join(map(repr, REMAT_POLICIES))}, but it is {remat!r}")
        check_input_ids(input_ids, self.config.vocab_size)
        position_ids, visible_until = jnp.asarray(position_ids), jnp.asarray(visible_until)
        cos, sin = rope_tables(position_ids, self.config.head_dim, self.config.rope_theta)
        graphdef, layers = nnx.split(self.layers)

        def attention(q, k, v):
            return attend(q, k, v, visible_until, tables)

        def body(x, layer):
            # Gathered under the checkpoint: what is kept for the backward pass is the device's own part.
            return nnx.merge(graphdef, gather_layer(layer, shards, dtype))(x, cos, sin, attention), None

        # Fully unrolled, forward pass and recomputation are one program: only a barrier keeps XLA from merging them.
        barrier = unroll >= self.config.num_hidden_layers
        body = jax.checkpoint(body, policy=REMAT_POLICIES[remat], prevent_cse=barrier)
        x = embed(jnp.asarray(self.embed_tokens.get_value()), jnp.asarray(input_ids), dtype, shards)
        x, _ = lax.scan(body, x, layers, unroll=unroll)
        return self.norm(x, dtype)


def embed(
    table: Float[Array, "vocab d"], input_ids: Int[Array, "n"], dtype: DTypeLike, shards: Shards = Shards()
) -> Float[Array, "n hidden"]:
    """Rows of the embedding; NaN for an id outside of it (plain indexing would give the nearest row, silently)."""
    if shards == Shards():
        return table.at[input_ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False).astype(dtype)
    rows = sum_over_tensor(take_rows(table, input_ids, shards, dtype))
    known = (input_ids >= 0) & (input_ids < table.shape[0] * shards.tensor)
    return jnp.where(known[:, None], rows, jnp.nan)


def check_input_ids(input_ids: Any, vocab_size: int) -> None:
    """Raises ValueError naming the first id outside [0, vocab_size). Does nothing for a traced array (inside jit)."""
    if isinstance(input_ids, jax.core.Tracer):
        return
    ids = np.asarray(input_ids)
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(outside):
        raise ValueError(
            f"token id {ids.flat[outside[0]]} at index {outside[0]} is outside the vocabulary of {vocab_size} tokens: "
            "the data was tokenised for another model"
        )


def _normal(rngs: nnx.Rngs, std: float) -> Normal:
    """Draws float32 normal weights, on the host in numpy (no compile per shape) unless `rngs` is traced."""
    key = rngs.params()
    if isinstance(key, jax.core.Tracer):
        return lambda shape: std * jax.random.normal(rngs.params(), shape, jnp.float32)
    rng = np.random.Generator(np.random.Philox(np.asarray(jax.random.key_data(key)).tolist()))
    return lambda shape: jnp.asarray(rng.standard_normal(shape, np.float32) * np.float32(std))


def model_params(model: Qwen3) -> dict[str, Any]:
    """The parameters as a nested plain dict of arrays; the dict that steps, checkpoints and `params_to_hf` take."""
    return nnx.to_pure_dict(nnx.split(model, nnx.Param)[1])


@lru_cache(maxsize=32)
def model_graphdef(config: Qwen3Config) -> nnx.GraphDef:
    """The model without its arrays: `nnx.merge(model_graphdef(config), params)` is a `Qwen3`. Nothing is allocated."""
    return nnx.split(_abstract_model(config))[0]


@lru_cache(maxsize=32)
def _abstract_params(config: Qwen3Config) -> dict[str, Any]:
    return model_params(_abstract_model(config))


def abstract_params(config: Qwen3Config) -> dict[str, Any]:
    """`model_params` with a float32 `jax.ShapeDtypeStruct` in the place of every array."""
    return jax.tree.map(lambda leaf: leaf, _abstract_params(config))


def _abstract_model(config: Qwen3Config) -> Qwen3:
    return nnx.eval_shape(lambda: Qwen3(config, rngs=nnx.Rngs(0)))


def init_params(config: Qwen3Config, seed: int) -> dict[str, Any]:
    """Random float32 parameters as numpy arrays, a pure function of (config, seed); nothing runs on a device.

    Matrices are normal with `initializer_range` as standard deviation, norms one, biases zero, as Transformers does it.
    """
    rng = np.random.Generator(np.random.Philox(seed))

    def init(path, leaf):
        kind = path[-1].key
        if kind == "scale":
            return np.ones(leaf.shape, np.float32)
        if kind == "bias":
            return np.zeros(leaf.shape, np.float32)
        return rng.standard_normal(leaf.shape, np.float32) * np.float32(config.initializer_range)

    return jax.tree_util.tree_map_with_path(init, _abstract_params(config))
