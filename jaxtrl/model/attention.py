"""Attention over a token row: causal, packed and tree rows are one program with other numbers (DESIGN.md section 4).

The host lists the pairs of blocks that have to meet (`rows/blocks.py`). Each block meets itself first; that gives every
query a finite running maximum, as a token sees itself. The other pairs are then visited one after the other with an
online softmax (Rabe and Staats, https://arxiv.org/abs/2112.05682; FlashAttention, https://arxiv.org/abs/2205.14135), and
once more in the backward pass, which recomputes the probabilities from the saved log-sum-exp. Memory is linear in N,
every write is a contiguous slice.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxtrl.rows.blocks import BlockTables

MASKED = -1e30  # finite: no NaN, and exp(MASKED - maximum) is exactly 0


def attend(
    q: Float[Array, "n heads d"],
    k: Float[Array, "n kv_heads d"],
    v: Float[Array, "n kv_heads d"],
    visible_until: Int[Array, "n"],
    tables: BlockTables,
) -> Float[Array, "n heads d"]:
    """softmax(q k^T / sqrt(d)) v, where token `j` is seen by the tokens `i` with `j <= i < visible_until[j]`.

    q, k, v share a dtype (float32 or bfloat16), which is the dtype of the result and of the matmul inputs; scores, softmax
    and sums are float32. Query head `h` uses key/value head `h // (heads / kv_heads)`. `tables` are the `block_tables` of
    the same `visible_until`. Raises ValueError where heads, dtypes or the tables do not fit.
    """
    n, heads, _ = q.shape
    kv_heads, blocks = k.shape[1], tables.query_lanes.shape[-1]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key/value heads: check the model config")
    if n % blocks or tables.query_lanes.ndim != 1:
        raise ValueError(f"a row of {n} tokens got tables of shape {tables.query_lanes.shape}: build them for this row")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}: cast them to one compute dtype")
    return _attend(q, k, v, visible_until, tables)


@jax.custom_vjp
def _attend(q, k, v, visible_until, tables):
    return _forward(q, k, v, visible_until, tables)[0]


def _split(x: Array, blocks: int, kv_heads: int) -> Array:
    """[N, H, d] -> [blocks, kv_heads, group * B, d]: the heads that share a key head are further rows of one matmul."""
    n, heads, d = x.shape
    x = x.reshape(blocks, n // blocks, kv_heads, heads // kv_heads, d)
    return x.transpose(0, 2, 3, 1, 4).reshape(blocks, kv_heads, -1, d)


def _join(x: Array, n: int) -> Array:
    """The inverse of `_split`."""
    blocks, kv_heads, _, d = x.shape
    x = x.reshape(blocks, kv_heads, -1, n // blocks, d)
    return x.transpose(0, 3, 1, 2, 4).reshape(n, -1, d)


def _dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """Batched matmul over axis 0 (key/value heads), accumulated in float32."""
    dims = (((contract[0],), (contract[1],)), ((0,), (0,)))
    return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def _scores(q: Array, k: Array, mask: Array) -> Array:
    """[kv_heads, group * B, B] masked float32 scores; `mask` is [B, B] and the same for every head."""
    s = _dot(q, k, (2, 2)) * (q.shape[-1] ** -0.5)
    kv_heads, _, size = s.shape
    s = s.reshape(kv_heads, -1, size, size)
    return jnp.where(mask, s, MASKED).reshape(kv_heads, -1, size)


def _mask(query_block: Array, key_block: Array, until: Array, live: Any) -> Array:
    """[B, B]: which tokens of the query block see which of the key block, whose `visible_until` is `until`."""
    size = until.shape[0]
    index = lax.iota(jnp.int32, size)
    query, key = query_block * size + index[:, None], key_block * size + index[None, :]
    return (query >= key) & (query < until[None, :]) & live


def _varying(like: Any, x: Any) -> Any:
    """`x` cast to vary over the mesh axes over which any leaf of `like` varies (scan carries must, under shard_map)."""
    axes = _axes(like)
    return jax.tree.map(lambda leaf: lax.pcast(leaf, tuple(axes - jax.typeof(leaf).mat.varying), to="varying"), x)


def _axes(tree: Any) -> frozenset:
    return frozenset().union(*(jax.typeof(leaf).mat.varying for leaf in jax.tree.leaves(tree)))


def _take(x: Array, block: Array) -> Array:
    return lax.dynamic_index_in_dim(x, block, 0, keepdims=False)


def _put(x: Array, value: Array, block: Array) -> Array:
    return lax.dynamic_update_index_in_dim(x, value, block, 0)


def _add(x: Array, value: Array, block: Array) -> Array:
    return _put(x, _take(x, block) + value, block)


def _steps(tables: BlockTables):
    """(query block, key block, is this step real) of every step: the diagonal pairs, then the lanes."""
    blocks, lanes = tables.query_lanes.shape[0], tables.lane_query.shape[0]
    diagonal = lax.iota(jnp.int32, blocks)
    live = lax.iota(jnp.int32, lanes) < tables.query_lanes.sum()
    query = jnp.concatenate([diagonal, jnp.where(live, tables.lane_query, 0)])
    key = jnp.concatenate([diagonal, jnp.where(live, tables.lane_key, 0)])
    return query, key, jnp.concatenate([jnp.ones(blocks, bool), live])


def _forward(q, k, v, visible_until, tables):
    blocks, kv_heads, n = tables.query_lanes.shape[0], k.shape[1], q.shape[0]
    qs, ks, vs = (_split(x, blocks, kv_heads) for x in (q, k, v))
    until = visible_until.reshape(blocks, -1)

    def step(carry, pair):
        out, top, total = carry
        a, b, live = pair
        s = _scores(_take(qs, a), _take(ks, b), _mask(a, b, _take(until, b), live))
        old = _take(top, a)
        new = jnp.maximum(old, s.max(-1))
        p = jnp.exp(s - new[..., None])
        keep = jnp.exp(old - new)
        o = _take(out, a) * keep[..., None] + _dot(p.astype(q.dtype), _take(vs, b), (2, 1))
        return (_put(out, o, a), _put(top, new, a), _put(total, _take(total, a) * keep + p.sum(-1), a)), None

    rows = jnp.zeros(qs.shape[:3], jnp.float32)
    start = _varying((q, k, v, visible_until, tables), (jnp.zeros(qs.shape, jnp.float32), rows + MASKED, rows))
    (out, top, total), _ = lax.scan(step, start, _steps(tables))
    # The remat policy "matmuls" (model/qwen3.py) keeps what has this name, so that the backward pass finds both.
    out = checkpoint_name(_join(out / total[..., None], n).astype(q.dtype), "attention")
    lse = checkpoint_name(top + jnp.log(total), "attention")
    return out, (q, k, v, visible_until, tables, out, lse)


def _backward(saved, cotangent):
    q, k, v, visible_until, tables, out, lse = saved
    blocks, kv_heads, n = tables.query_lanes.shape[0], k.shape[1], q.shape[0]
    qs, ks, vs, dos = (_split(x, blocks, kv_heads) for x in (q, k, v, cotangent.astype(q.dtype)))
    until = visible_until.reshape(blocks, -1)
    # sum_j p_ij dp_ij = do_i . o_i, so the softmax's own gradient needs no second pass
    delta = _split((cotangent.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)[..., None], blocks, kv_heads)
    scale = q.shape[-1] ** -0.5

    def step(carry, pair):
        dq, dk, dv = carry
        a, b, live = pair
        qa, kb, do = _take(qs, a), _take(ks, b), _take(dos, a)
        p = jnp.exp(_scores(qa, kb, _mask(a, b, _take(until, b), live)) - _take(lse, a)[..., None])
        ds = (p * (_dot(do, _take(vs, b), (2, 2)) - _take(delta, a)) * scale).astype(q.dtype)
        dv = _add(dv, _dot(p.astype(q.dtype), do, (1, 1)), b)
        return (_add(dq, _dot(ds, kb, (2, 1)), a), _add(dk, _dot(ds, qa, (1, 1)), b), dv), None

    zeros = (jnp.zeros(x.shape, jnp.float32) for x in (qs, ks, vs))
    start = _varying((saved, cotangent), tuple(zeros))
    grads, _ = lax.scan(step, start, _steps(tables))
    return *(_match(_join(g, n), x) for g, x in zip(grads, (q, k, v), strict=True)), None, None


def _match(grad: Array, primal: Array) -> Array:
    """The cotangent in the primal's dtype, summed over the mesh axes over which the primal does not vary."""
    axes = _axes(grad) - _axes(primal)
    return lax.psum(grad, tuple(axes)).astype(primal.dtype) if axes else grad.astype(primal.dtype)


_attend.defvjp(_forward, _backward)
