"""Attention over a token row: causal, packed and tree rows are one program with other numbers (DESIGN.md section 4).

The host lists the pairs of blocks that have to meet (`rows/blocks.py`). The device visits them one after the other with
an online softmax (https://arxiv.org/abs/2112.05682, https://arxiv.org/abs/2205.14135), each block with itself first:
a token sees itself, so every query has a finite running maximum from then on, and those visits have nothing to add to.
The backward pass walks through the same pairs once more and recomputes the probabilities from the saved log-sum-exp.
Memory is linear in N, every write is a contiguous slice, and a pair that is not listed is never computed.

Inside, arrays are cut into blocks `[C, S, R, d]`: `C` (chunk of key/value heads, block of the row), `S` heads of that
chunk (no such axis for one head: XLA's CPU reductions are slow over an axis of size 1), `R` tokens of the block (keys,
values) or tokens x query heads per key/value head, so that the query heads that share a key are further rows of one
matmul and K and V are never repeated.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxtrl.model.remat import keep_residual
from jaxtrl.model.sharding import vary, varying_axes
from jaxtrl.rows.blocks import BlockTables, CountedTables

MASKED = -1e30  # finite, so no NaN can arise; exp(MASKED - maximum) is exactly 0
# Scores in one step on a CPU: few enough for its caches, many enough to pay for handing each product to the cores
# (measured on 2 cores with 1 MiB of L2 cache each: 2**17 is 15 to 20 % slower, 2**21 no faster).
CACHED_SCORES = 2**19


def attend(
    q: Float[Array, "n heads d"],
    k: Float[Array, "n kv_heads d"],
    v: Float[Array, "n kv_heads d"],
    visible_until: Int[Array, "n"],
    tables: BlockTables,
) -> Float[Array, "n heads d"]:
    """softmax(q k^T / sqrt(d)) v, where token `j` is seen by the tokens `i` with `j <= i < visible_until[j]`.

    q, k, v share a dtype (float32 or bfloat16): that of the result and of the matmul inputs; scores, softmax and sums
    are float32. Query head `h` uses key/value head `h // (heads / kv_heads)`. `tables` are the `block_tables` of the
    same `visible_until`. The output and its log-sum-exp carry the name "attention" for checkpoint policies. Raises
    ValueError where heads, dtypes or tables do not fit together.
    """
    (n, heads, d), kv_heads, blocks = q.shape, k.shape[1], tables.query_lanes.shape[-1]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key/value heads: check the model config")
    if tables.query_lanes.ndim != 1 or n % blocks:
        raise ValueError(f"a row of {n} tokens got tables of shape {tables.query_lanes.shape}: build them for this row")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}: cast them to one compute dtype")
    together = _heads_per_step(kv_heads, heads // kv_heads * (n // blocks) ** 2)

    def split(x: Array) -> Array:
        x = x.reshape(blocks, n // blocks, kv_heads // together, together, -1)
        chunk = () if together == 1 else (together,)
        return x.transpose(2, 0, 3, 1, 4).reshape(-1, *chunk, n // blocks * (x.shape[-1] // d), d)

    out = _attend(split(q), split(k), split(v), visible_until.reshape(blocks, -1), tables)
    out = out.reshape(kv_heads // together, blocks, together, n // blocks, -1)
    return out.transpose(1, 3, 0, 2, 4).reshape(n, heads, d)


def _heads_per_step(kv_heads: int, scores_per_head: int) -> int:
    """All key/value heads at once, on a CPU only as many (a divisor) as keep the scores of a step in the cache."""
    if jax.default_backend() != "cpu":
        return kv_heads
    fit = max(1, CACHED_SCORES // scores_per_head)
    return max(s for s in range(1, kv_heads + 1) if kv_heads % s == 0 and s <= fit)


@jax.custom_vjp
def _attend(q: Array, k: Array, v: Array, until: Array, tables: BlockTables) -> Array:
    return _forward(q, k, v, until, tables)[0]


class _Step(NamedTuple):
    """One visit, or a list of them: query block, key block, whether it is real, and the first block of its heads."""

    query: Array
    key: Array
    live: Array
    chunk: Array


def _own_blocks(blocks: int, chunks: int) -> _Step:
    """Each block with itself, in the order of the arrays."""
    block = np.tile(np.arange(blocks, dtype=np.int32), chunks)
    chunk = np.repeat(np.arange(chunks, dtype=np.int32) * blocks, blocks)
    return _Step(*map(jnp.asarray, (block, block, np.ones(blocks * chunks, bool), chunk)))


def _visit_lanes(visit: Callable[[Any, _Step], Any], carry: Any, tables: BlockTables, chunks: int) -> Any:
    """`visit` applied to the lanes, for each chunk of heads; padding lanes are dead or left out, whatever they hold."""
    blocks, lanes = tables.query_lanes.shape[0], tables.lane_query.shape[0]
    listed = tables.query_lanes.sum()
    live = lax.iota(jnp.int32, lanes) < listed
    query, key = (jnp.where(live, lane, 0) for lane in (tables.lane_query, tables.lane_key))
    chunk = np.tile(np.arange(chunks, dtype=np.int32) * blocks, lanes)
    steps = _Step(jnp.repeat(query, chunks), jnp.repeat(key, chunks), jnp.repeat(live, chunks), jnp.asarray(chunk))
    if isinstance(tables, CountedTables):

        def visit_numbered(i, carry):
            return visit(carry, _Step(*(_take(x, i) for x in steps)))

        return lax.fori_loop(0, listed * chunks, visit_numbered, carry)
    return lax.scan(lambda carry, step: (visit(carry, step), None), carry, steps)[0]


def _mask(step: _Step, until: Array, rows: int, transposed: bool) -> Array:
    """[rows, B], or [B, rows] if transposed: which query rows of the pair see which keys."""
    size = until.shape[1]
    query = step.query * size + np.arange(rows, dtype=np.int32) // (rows // size)
    key = step.key * size + lax.iota(jnp.int32, size)
    end = jnp.where(step.live, _take(until, step.key), 0)
    if transposed:
        return (key[:, None] <= query) & (query < end[:, None])
    return (key <= query[:, None]) & (query[:, None] < end)


def _take(x: Array, block: Array) -> Array:
    return lax.dynamic_index_in_dim(x, block, 0, keepdims=False)


def _put(x: Array, value: Array, block: Array) -> Array:
    return lax.dynamic_update_index_in_dim(x, value, block, 0)


def _dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """Matmul over the last two axes, for each head of a chunk where there is such an axis, accumulated in float32."""
    heads = tuple(range(a.ndim - 2))
    axes = ((contract[0] % a.ndim,), (contract[1] % b.ndim,))
    return lax.dot_general(a, b, (axes, (heads, heads)), preferred_element_type=jnp.float32)


def _forward(q: Array, k: Array, v: Array, until: Array, tables: BlockTables) -> tuple[Array, tuple]:
    rows, scale, (blocks, _) = q.shape[-2], q.shape[-1] ** -0.5, until.shape

    def scores(step, queries, keys):
        visible = _mask(step, until, rows, transposed=False)
        return jnp.where(visible, _dot(queries, keys, (-1, -1)) * scale, MASKED)

    def visit_own(_, xs):
        step, queries, keys, values = xs
        s = scores(step, queries, keys)
        top = s.max(axis=-1)
        p = jnp.exp(s - top[..., None])
        total = p.sum(axis=-1)
        return None, (_dot(p.astype(q.dtype), values, (-1, -2)) * (1 / total)[..., None], top, total)

    def visit(carry, step):
        out, top, total = carry
        a, b = step.chunk + step.query, step.chunk + step.key
        # Behind a barrier: read inside a fusion, the two would be copied whole before they are written below.
        old_top, old_total = lax.optimization_barrier((_take(top, a), _take(total, a)))
        s = scores(step, _take(q, a), _take(k, b))
        new_top = jnp.maximum(old_top, s.max(axis=-1))
        p, kept = jnp.exp(s - new_top[..., None]), old_total * jnp.exp(old_top - new_top)
        new_total = kept + p.sum(axis=-1)
        # `out` is normalised at every step: that is one pass over it less than once at the end. Where nothing new is
        # visible the factors are exactly 1 and 0, so that no bit of the row depends on visits that show it nothing.
        new = _dot(p.astype(q.dtype), _take(v, b), (-1, -2)) * (1 / new_total)[..., None]
        out = _put(out, _take(out, a) * (kept / new_total)[..., None] + new, a)
        return out, _put(top, new_top, a), _put(total, new_total, a)

    chunks = q.shape[0] // blocks
    state = lax.scan(visit_own, None, (_own_blocks(blocks, chunks), q, k, v))[1]
    out, top, total = _visit_lanes(visit, _vary_as(tables, state), tables, chunks)
    out = keep_residual(out.astype(q.dtype), "attention")
    return out, (q, k, v, until, tables, out, keep_residual(top + jnp.log(total), "attention"))


def _backward(saved: tuple, cotangent: Array) -> tuple[Array | None, ...]:
    """Scores are kept transposed, [keys, queries], and so is dq: then no matmul reads its left input down the columns,
    for which XLA has no fast kernel on CPU."""
    q, k, v, until, tables, out, lse = saved
    rows, scale, (blocks, _) = q.shape[-2], q.shape[-1] ** -0.5, until.shape
    # The gradient of softmax subtracts sum_j p_ij dp_ij, which is do_i . o_i: no second pass over the row is needed.
    delta = (cotangent.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1)

    def gradients(step, queries, keys, values, do, lse, delta):
        s = _dot(keys, queries, (-1, -1)) * scale - lse[..., None, :]
        p = jnp.exp(jnp.where(_mask(step, until, rows, transposed=True), s, MASKED))
        ds = (p * (_dot(values, do, (-1, -1)) - delta[..., None, :])).astype(q.dtype)
        return _dot(keys.mT, ds, (-1, -2)), _dot(ds, queries, (-1, -2)), _dot(p.astype(q.dtype), do, (-1, -2))

    def visit(carry, step):
        a, b = step.chunk + step.query, step.chunk + step.key
        queries, keys, values, do = _take(q, a), _take(k, b), _take(v, b), _take(cotangent, a)
        new = gradients(step, queries, keys, values, do, _take(lse, a), _take(delta, a))
        return tuple(_put(x, _take(x, i) + y, i) for x, y, i in zip(carry, new, (a, b, b), strict=True))

    chunks = q.shape[0] // blocks
    own = (_own_blocks(blocks, chunks), q, k, v, cotangent, lse, delta)
    state = lax.scan(lambda _, xs: (None, gradients(*xs)), None, own)[1]
    dq, dk, dv = _visit_lanes(visit, _vary_as(tables, state), tables, chunks)
    return _cotangent(dq.mT * scale, q), _cotangent(dk * scale, k), _cotangent(dv, v), None, None


_attend.defvjp(_forward, _backward)


def _vary_as(like: Any, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """A scan's carry must vary from its start over the axes over which what it is computed from varies."""
    return vary(arrays, varying_axes(like))


def _cotangent(grad: Array, primal: Array) -> Array:
    """In the dtype of the primal, summed over the mesh axes over which the primal is the same everywhere."""
    axes = tuple(sorted(varying_axes(grad) - varying_axes(primal)))
    return (lax.psum(grad, axes) if axes else grad).astype(primal.dtype)
