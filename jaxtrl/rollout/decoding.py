"""Generation on the device with static shapes: prefill, copies into slots, and decoding of k tokens per call.

The layers are those of training (`DecoderLayer`); only `attention` differs. The cache is one buffer per layer, keys and
values each `[slots, kv_heads, columns, head_dim]`. Token `i` of a slot stands in column `i`, so that a slot's length is
all that says what it sees, columns are read only as far as the cache is long, and a refill starts at column 0.

Within a call the cache is constant and new keys and values go to a tail `[slots, kv_heads, k, head_dim]`, all slots at
the same index: one contiguous write. After the call the tail is merged, slot by slot, each a contiguous write at that
slot's length. DESIGN.md's ring buffer (one shared column) would merge with a single write instead, but its slots'
windows wander through the whole buffer and wrap: every call would have to read all columns, however short the
completions are, and a refill would write in two parts. No write can clamp: the host reserves columns for the longest
completion and a whole call beyond it.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxtrl.model.attention import MASKED, attend
from jaxtrl.model.config import Qwen3Config
from jaxtrl.model.qwen3 import DecoderLayer, Linear, RMSNorm, embed
from jaxtrl.model.rope import rope_tables
from jaxtrl.rollout.sampling import Controls, Drawn, draw_slots
from jaxtrl.rollout.skinny import SkinnyLinear, head_scores, product, row_products
from jaxtrl.rows.blocks import DEFAULT_BLOCK_SIZE, BlockTables

BLOCK = DEFAULT_BLOCK_SIZE  # tokens copied from a prefilled row to a slot at a time; divides rows and columns


class Weights(NamedTuple):
    """The parameters for generation: kernels and embedding in the compute dtype, one entry per layer."""

    embedding: Float[Array, "vocab d"]
    head: Float[Array, "vocab d"]
    norm: Any
    layers: tuple[Any, ...]


class KeyValue(NamedTuple):
    """Keys and values of one layer."""

    key: Float[Array, "*slots kv_heads columns d"]
    value: Float[Array, "*slots kv_heads columns d"]


class PromptRow(NamedTuple):
    """Prompts as one token row of a class of the ladder."""

    input_ids: Int[Array, "n"] | Int[np.ndarray, "n"]
    position_ids: Int[Array, "n"] | Int[np.ndarray, "n"]
    visible_until: Int[Array, "n"] | Int[np.ndarray, "n"]
    tables: BlockTables


class Marks(NamedTuple):
    """What the filtered program needs beside the logits."""

    seen: Bool[Array, "slots vocab"] | Bool[np.ndarray, "slots vocab"]  # tokens of prompt and completion so far
    stops: Bool[Array, "slots vocab"] | Bool[np.ndarray, "slots vocab"]  # forbidden for the first `held` tokens
    held: Int[Array, "slots"] | Int[np.ndarray, "slots"]


class SlotInputs(NamedTuple):
    """What a device call is told about each slot. `marks` is None in the plain program."""

    token: Int[Array, "slots"] | Int[np.ndarray, "slots"]  # the last token of prompt or completion
    length: Int[Array, "slots"] | Int[np.ndarray, "slots"]  # tokens before it, all of them in the cache
    uniforms: Float[Array, "k slots"] | Float[np.ndarray, "k slots"]
    controls: Controls
    marks: Marks | None


@lru_cache(maxsize=32)
def _modules(config: Qwen3Config, linear: type[Linear]) -> tuple[Any, Any]:
    """Graph definitions of one layer and of the final norm."""
    layers = nnx.eval_shape(lambda: DecoderLayer(config, jnp.zeros, linear))
    norm = nnx.eval_shape(lambda: RMSNorm((config.hidden_size,), config.rms_norm_eps))
    return nnx.split(layers)[0], nnx.split(norm)[0]


def make_weights(config: Qwen3Config, dtype: DTypeLike, linear: type[Linear], params: Any) -> Weights:
    """`model_params` as `Weights`: copies, so that a train step may go on to donate `params`.

    Layers are cut apart here, once per update: a program that slices stacked weights reads and writes them all again.
    Norm scales stay float32, as training applies them. Kernels are transposed for `SkinnyLinear`.
    """

    def cast(path, leaf):
        if linear is SkinnyLinear and path[-1].key == "kernel":
            leaf = leaf.T
        return jnp.array(leaf, jnp.float32 if path[-1].key == "scale" else dtype, copy=True)

    stacked, count = params["layers"], config.num_hidden_layers
    layers = tuple(jax.tree_util.tree_map_with_path(cast, jax.tree.map(lambda x: x[i], stacked)) for i in range(count))  # noqa: B023
    embedding = jnp.array(params["embed_tokens"], dtype, copy=True)
    head = embedding if config.tie_word_embeddings else jnp.array(params["lm_head"], dtype, copy=True)
    return Weights(embedding, head, jax.tree.map(jnp.copy, params["norm"]), layers)


def _apply_layers(
    config: Qwen3Config, linear: type[Linear], weights: Weights, x: Array, positions: Array, attention: Callable
) -> Array:
    """All layers on the embedded tokens `x`; `attention(layer, q, k, v)`."""
    cos, sin = rope_tables(positions, config.head_dim, config.rope_theta)
    graphdef, _ = _modules(config, linear)
    for number, layer in enumerate(weights.layers):
        x = nnx.merge(graphdef, layer)(x, cos, sin, partial(attention, number))
    return x


def prefill(
    config: Qwen3Config,
    dtype: DTypeLike,
    cache_dtype: DTypeLike,
    linear: type[Linear],
    weights: Weights,
    row: PromptRow,
) -> tuple[KeyValue, ...]:
    """Keys and values of the row's tokens, per layer; BLOCK empty ones follow, so that no copy reads past the end."""
    kept = []

    def attention(_, q, k, v):
        kept.append(KeyValue(*(_columns(x.astype(cache_dtype), x.shape[0] + BLOCK) for x in (k, v))))
        return attend(q, k, v, jnp.asarray(row.visible_until), row.tables)

    x = embed(weights.embedding, jnp.asarray(row.input_ids), dtype)
    _apply_layers(config, linear, weights, x, jnp.asarray(row.position_ids), attention)
    return tuple(kept)


def _columns(x: Float[Array, "n kv_heads d"], columns: int) -> Float[Array, "kv_heads columns d"]:
    return jnp.pad(x.transpose(1, 0, 2), ((0, 0), (0, columns - x.shape[0]), (0, 0)))


def insert(
    caches: tuple[KeyValue, ...], prefilled: tuple[KeyValue, ...], copies: Int[Array, "m 3"]
) -> tuple[KeyValue, ...]:
    """The caches with m copies of BLOCK tokens: from a place in the prefilled row to a column of a slot."""

    def put(caches, copy):
        start, slot, column = copy

        def one(cache, row):
            piece = lax.dynamic_slice_in_dim(row, start, BLOCK, axis=1)
            return lax.dynamic_update_slice(cache, piece[None], (slot, 0, column, 0))

        return jax.tree.map(one, caches, prefilled), None

    return lax.scan(put, caches, copies)[0]


def _heads_product(a: Float[Array, "s h g i"], b: Float[Array, "s h m n"], axis: int) -> Float[Array, "s h g o"]:
    """Of every slot and head, in float32; `axis` of b (2 or 3) is summed over."""
    axes = ((3,), (axis,)), ((0, 1), (0, 1))
    return lax.dot_general(a, b.astype(a.dtype), axes, preferred_element_type=jnp.float32)


def attend_cached(
    q: Float[Array, "slots heads d"],
    cache: KeyValue,
    tail: KeyValue,
    length: Int[Array, "slots"],
    step: Int[Array, ""],
    scores: Callable[[Array, Array], Array],
) -> Float[Array, "slots heads d"]:
    """softmax(q k^T / sqrt(d)) v over the first `length` columns of the cache and the tail up to `step`, in float32.

    `scores` is what multiplies queries [slots, kv_heads, group, d] and keys [slots, kv_heads, columns, d].
    """
    slots, heads, d = q.shape
    kv_heads, columns = cache.key.shape[1:3]
    grouped = q.reshape(slots, kv_heads, heads // kv_heads, d)
    visible = lax.iota(jnp.int32, columns) < length[:, None]
    old = jnp.where(visible[:, None, None], scores(grouped, cache.key) * d**-0.5, MASKED)
    recent = lax.iota(jnp.int32, tail.key.shape[2]) <= step
    new = jnp.where(recent, scores(grouped, tail.key) * d**-0.5, MASKED)
    top = jnp.maximum(old.max(-1, keepdims=True), new.max(-1, keepdims=True))
    old, new = jnp.exp(old - top), jnp.exp(new - top)
    total = old.sum(-1, keepdims=True) + new.sum(-1, keepdims=True)
    out = _heads_product(old.astype(q.dtype), cache.value, 2) + _heads_product(new.astype(q.dtype), tail.value, 2)
    return (out / total).astype(q.dtype).reshape(slots, heads, d)


def decode(
    config: Qwen3Config,
    dtype: DTypeLike,
    linear: type[Linear],
    weights: Weights,
    caches: tuple[KeyValue, ...],
    inputs: SlotInputs,
) -> tuple[tuple[KeyValue, ...], Drawn]:
    """The caches with k more tokens in every slot, and what was drawn, fields [k, slots]."""
    is_skinny = linear is SkinnyLinear
    scores = head_scores if is_skinny else partial(_heads_product, axis=3)
    count, marks = inputs.uniforms.shape[0], inputs.marks
    length = jnp.asarray(inputs.length)
    norm = nnx.merge(_modules(config, linear)[1], weights.norm)

    def step(carry, xs):
        token, tails, seen = carry
        number, uniform = xs
        new_tails = []

        def attention(layer, q, k, v):
            added = KeyValue(*(_append(x, y, number) for x, y in zip(tails[layer], (k, v), strict=True)))
            new_tails.append(added)
            return attend_cached(q, caches[layer], added, length, number, scores)

        x = embed(weights.embedding, token, dtype)
        x = norm(_apply_layers(config, linear, weights, x, length + number, attention), dtype)
        logits = product(x, weights.head) if is_skinny else row_products(x, weights.head)
        forbidden = None if marks is None else marks.stops & (number < marks.held)[:, None]
        drawn = draw_slots(logits, uniform, inputs.controls, seen, forbidden, halvings=3 if is_skinny else 1)
        if seen is not None:
            seen = seen | (lax.iota(jnp.int32, seen.shape[1]) == drawn.token[:, None])
        return (drawn.token, tuple(new_tails), seen), drawn

    tails = jax.tree.map(lambda x: jnp.zeros((*x.shape[:2], count, x.shape[3]), x.dtype), caches)
    start = jnp.asarray(inputs.token), tails, None if marks is None else jnp.asarray(marks.seen)
    (_, tails, _), drawn = lax.scan(step, start, (jnp.arange(count, dtype=jnp.int32), jnp.asarray(inputs.uniforms)))
    return _merge(caches, tails, length), drawn


def _append(tail: Array, new: Float[Array, "slots kv_heads d"], number: Array) -> Array:
    return lax.dynamic_update_slice_in_dim(tail, new[:, :, None].astype(tail.dtype), number, axis=2)


def _merge(caches: tuple[KeyValue, ...], tails: tuple[KeyValue, ...], length: Int[Array, "slots"]) -> Any:
    """Every slot's tail at that slot's length."""

    def put(caches, slot):
        def one(cache, tail):
            piece = lax.dynamic_slice_in_dim(tail, slot, 1, axis=0)
            return lax.dynamic_update_slice(cache, piece, (slot, 0, length[slot], 0))

        return jax.tree.map(one, caches, tails), None

    return lax.scan(put, caches, jnp.arange(length.shape[0], dtype=jnp.int32))[0]
