"""`attend` against a dense softmax: values, gradients, isolation, memory, sharding, and what Neuron allows."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jaxtrl.model import attention
from jaxtrl.model.attention import attend
from jaxtrl.rows.blocks import BlockTables, CountedTables, block_tables, count_lanes
from tests.visibility import causal, forests, intervals, packed, tree

FEW = settings(deadline=None, max_examples=30)


def dense_attend(q, k, v, visible_until):
    """The oracle: every score of every pair, masked, in float32."""
    group, index = q.shape[1] // k.shape[1], jnp.arange(q.shape[0])
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
    seen = (index[None, :] <= index[:, None]) & (index[:, None] < visible_until[None, :])
    scores = jnp.einsum("ihd,jhd->hij", q, k, precision="highest") / np.sqrt(q.shape[2])
    p = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=2)
    return jnp.einsum("hij,jhd->ihd", p, v, precision="highest")


def with_gradients(function):
    """(q, k, v, w, ...) -> output and the gradients of sum(output * w), in one program."""

    @jax.jit
    def run(q, k, v, w, *rest):
        out, back = jax.vjp(lambda q, k, v: function(q, k, v, *rest), q, k, v)
        return out, *back(w.astype(out.dtype))

    return run


dense = with_gradients(dense_attend)
blocked = with_gradients(attend)


def inputs(n, heads=4, kv_heads=2, d=8, seed=0, dtype=jnp.float32):
    """q, k, v, and the cotangent w."""
    draw = np.random.default_rng(seed).standard_normal
    return tuple(jnp.asarray(draw((n, h, d)), dtype) for h in (heads, kv_heads, kv_heads, heads))


def assert_dense(got, args, visible_until):
    for name, x, y in zip(("out", "dq", "dk", "dv"), got, dense(*args, visible_until), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-5, err_msg=name)


def check(visible_until, size, spare=0, **shape):
    args = inputs(len(visible_until), **shape)
    tables = block_tables(visible_until, size, lanes=count_lanes(visible_until, size) + spare)
    assert_dense(blocked(*args, visible_until, tables), args, visible_until)


def all_lanes(visible_until, size):
    """Tables as large as any row of this length needs: one program for all of them."""
    blocks = len(visible_until) // size
    return block_tables(visible_until, size, lanes=blocks * (blocks - 1) // 2 + 1)


@FEW
@given(forests(max_blocks=0, size=8, blocks=5), st.integers(0, 2**31))
def test_random_forests_with_padding(visible_until, seed):
    args = inputs(40, seed=seed)
    for size in (4, 8):
        assert_dense(blocked(*args, visible_until, all_lanes(visible_until, size)), args, visible_until)


@FEW
@given(forests(max_blocks=0, size=8, blocks=5), st.integers(0, 2**31))
def test_table_padding_of_random_forests_changes_no_bit(visible_until, seed):
    """Padding lanes may hold any number, and a device that leaves them out computes the same bits."""
    args, tables = inputs(40, seed=seed), all_lanes(visible_until, 8)
    clean = blocked(*args, visible_until, tables)
    live, draw = int(tables.query_lanes.sum()), np.random.default_rng(seed)
    lanes = [field.copy() for field in tables[:2]]
    for lane in lanes:
        lane[live:] = draw.integers(-(2**31), 2**31, len(lane) - live)
        lane[live : live + 3] = draw.integers(0, 5, min(3, len(lane) - live))  # a pair that exists, once more
    for kind in (BlockTables, CountedTables):
        for x, y in zip(blocked(*args, visible_until, kind(*lanes, tables.query_lanes)), clean, strict=True):
            np.testing.assert_array_equal(x, y)


@FEW
@given(intervals(max_blocks=1, size=24), st.integers(0, 2**31))
def test_any_intervals(visible_until, seed):
    args = inputs(24, seed=seed)
    assert_dense(blocked(*args, visible_until, all_lanes(visible_until, 8)), args, visible_until)


@pytest.mark.parametrize("blocks", range(1, 8))
@settings(max_examples=10)
@given(data=st.data())
def test_every_multiple_of_the_block(blocks, data):
    """Causal and random rows; padding from the last token to the whole row."""
    args = inputs(4 * blocks, seed=blocks)
    for row in (causal(4 * blocks), data.draw(forests(max_blocks=0, size=4, blocks=blocks))):
        assert_dense(blocked(*args, row, all_lanes(row, 4)), args, row)


@pytest.mark.parametrize("size", [1, 8])
def test_rows_of_one_token(size):
    """Nothing but itself to see: the values come back, and no score has a gradient."""
    row, (q, k, v, w) = packed([1], size), inputs(size)
    out, dq, dk, dv = blocked(q, k, v, w, row, block_tables(row, size))
    np.testing.assert_array_equal(out, jnp.repeat(v, 2, axis=1))
    np.testing.assert_allclose(dv, w.reshape(size, 2, 2, 8).sum(axis=2), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(np.stack([np.abs(x).max() for x in (dq, dk)]), 0, atol=1e-5)


@pytest.mark.parametrize(
    "row",
    [
        packed([1] * 32),  # one-token documents
        packed([], 32),  # padding only
        packed([9], 32),  # blocks of padding only
        packed([5, 1, 13, 8], 32),
        packed([8, 8, 16]),  # documents that end with a block
        tree([0, 1, 2, 3, 4, 4, 5, 2, 3, 3, 0, 1, 1, 1, 2, 0, *[0] * 16]),
    ],
    ids=["one-token", "padding", "padding-blocks", "packed", "aligned", "tree"],
)
def test_kinds_of_row(row):
    check(row, 8, spare=2)


@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(1, 1, 8), (2, 2, 4), (6, 2, 16), (8, 1, 4), (3, 3, 5)])
def test_head_counts(heads, kv_heads, d):
    check(packed([11, 7], 24), 8, heads=heads, kv_heads=kv_heads, d=d)


@pytest.mark.parametrize("together", [1, 2, 4])
def test_heads_in_chunks(together, monkeypatch):
    monkeypatch.setattr(attention, "_heads_per_step", lambda kv_heads, scores: together)
    row, args = packed([11, 7], 24), inputs(24, heads=8, kv_heads=4)
    tables, run = block_tables(row, 8, lanes=5), with_gradients(lambda *args: attend(*args))
    got = run(*args, row, tables)
    for x, y in zip(got, dense(*args, row), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-5)
    for x, y in zip(run(*args, row, CountedTables(*tables)), got, strict=True):
        np.testing.assert_array_equal(x, y)


def test_heads_per_step_fit_the_cache_of_a_cpu(monkeypatch):
    assert attention._heads_per_step(8, 2 * 128 * 128) == 8
    assert attention._heads_per_step(8, 2 * 256 * 256) == 4
    assert attention._heads_per_step(8, 2 * 512 * 512) == 1
    assert attention._heads_per_step(6, 2 * 256 * 256) == 3
    monkeypatch.setattr(jax, "default_backend", lambda: "neuron")
    assert attention._heads_per_step(8, 2 * 512 * 512) == 8


def test_large_scores_do_not_overflow():
    q, k, v, w = inputs(16)
    row = packed([16])
    got = blocked(300 * q, 300 * k, v, w, row, block_tables(row, 4))
    assert all(np.isfinite(x).all() for x in got)
    np.testing.assert_allclose(got[0], dense(300 * q, 300 * k, v, w, row)[0], rtol=1e-4, atol=1e-4)


def test_poisoned_table_padding_changes_nothing():
    row, args = packed([13, 9, 1], 32), inputs(32)
    tables = block_tables(row, 4, lanes=40)
    live = int(tables.query_lanes.sum())
    clean = blocked(*args, row, tables)
    for query, key in ((0, 0), (7, 3), (2, 2), (10**6, -(10**6)), (np.iinfo(np.int32).max, np.iinfo(np.int32).min)):
        lane_query, lane_key = tables.lane_query.copy(), tables.lane_key.copy()
        lane_query[live:], lane_key[live:] = query, key
        poisoned = blocked(*args, row, BlockTables(lane_query, lane_key, tables.query_lanes))
        counted = blocked(*args, row, CountedTables(lane_query, lane_key, tables.query_lanes))
        for x, y, z in zip(poisoned, counted, clean, strict=True):
            np.testing.assert_array_equal(x, z)
            np.testing.assert_array_equal(y, z)


C14_TABLES = {
    "one block": block_tables(np.array([1, 2], np.int32), 2),
    "a block each": block_tables(np.array([1, 2], np.int32), 1, lanes=3),
    # query 1 is made to visit key 0, of which it sees nothing: its row of scores there is masked as a whole
    "a visit that shows nothing": BlockTables(*(np.array(x, np.int32) for x in ([1], [0], [0, 1]))),
}


@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("kind", [BlockTables, CountedTables])
@pytest.mark.parametrize("tables", C14_TABLES.values(), ids=C14_TABLES)
def test_c14_a_masked_padding_query_gives_one_and_finite_gradients(tables, kind, scale):
    """Scores 2x2, query 1 is padding, values [1, 2], loss = sum(out * [1, 0])."""
    row, values = np.array([1, 2], np.int32), jnp.array([1.0, 2.0]).reshape(2, 1, 1)
    q, k = scale * jnp.array([-3.0, 5.0]).reshape(2, 1, 1), scale * jnp.array([2.0, -7.0]).reshape(2, 1, 1)
    weight = jnp.array([1.0, 0.0]).reshape(2, 1, 1)
    out, *gradients = blocked(q, k, values, weight, row, kind(*tables))
    assert float((out * weight).sum()) == 1.0
    assert float(out[1, 0, 0]) == 2.0
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    np.testing.assert_array_equal(gradients[2].ravel(), [1.0, 0.0])


def test_number_of_padding_lanes_changes_no_bit():
    row, args = packed([13, 9, 1], 32), inputs(32)
    exact, spare = (block_tables(row, 4, lanes) for lanes in (None, 40))
    results = [blocked(*args, row, tables) for tables in (exact, spare, CountedTables(*exact), CountedTables(*spare))]
    for result in results[1:]:
        for x, y in zip(result, results[0], strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_document_changes_no_bit_of_another(dtype):
    """Outputs and gradients of the tokens outside the changed document, which shares blocks with its neighbours."""
    lengths = [13, 10, 17]
    row = packed(lengths, 48)
    tables = block_tables(row, 8)
    args, other = inputs(48, dtype=dtype), inputs(48, seed=1, dtype=dtype)
    before = blocked(*args, row, tables)
    for first, length in zip(np.cumsum([0, *lengths[:-1]]), lengths, strict=True):
        inside = (np.arange(48) >= first) & (np.arange(48) < first + length)
        changed = tuple(jnp.where(inside[:, None, None], 50 * y, x) for x, y in zip(args, other, strict=True))
        for x, y in zip(blocked(*changed, row, tables), before, strict=True):
            np.testing.assert_array_equal(x[~inside], y[~inside])
            assert (np.asarray(x[inside]) != np.asarray(y[inside])).any()


def test_a_branch_changes_no_bit_of_its_sibling():
    row = tree([*range(10), *range(4, 12), *range(4, 10)])  # a stem of 4 tokens with three branches
    tables, args = block_tables(row, 8), inputs(24)
    q, k, v, w = args
    before = blocked(*args, row, tables)[0]
    after = blocked(q, k.at[10:18].add(1.0), v.at[10:18].add(1.0), w, row, tables)[0]
    branch = (np.arange(24) >= 10) & (np.arange(24) < 18)
    np.testing.assert_array_equal(after[~branch], before[~branch])
    assert (np.asarray(after[branch]) != np.asarray(before[branch])).all()


def test_bfloat16_keeps_its_dtype_and_sums_in_float32():
    row = packed([300, 150], 512)
    args = inputs(512, dtype=jnp.bfloat16, d=16)
    got = blocked(*args, row, block_tables(row, 128))
    assert [x.dtype for x in got] == [jnp.bfloat16] * 4
    for x, y in zip(got, dense(*(x.astype(jnp.float32) for x in args), row), strict=True):
        error = np.abs(x.astype(jnp.float32) - y)
        assert error.max() < 0.03  # about 4 units in the last place of the largest entries
        assert error.mean() < 2e-3


def two_layers(q, k, v, row, tables, policy):
    """Two attentions in a scan of checkpointed layers, as the model has them."""

    @partial(jax.checkpoint, policy=policy)
    def layer(x, scale):
        return x + attend(x * scale, k, v, row, tables), None

    return jax.lax.scan(layer, q, jnp.array([0.5, 1.5]))[0]


@pytest.mark.parametrize("kind", [BlockTables, CountedTables])
@pytest.mark.parametrize("policy", ["nothing", "names"])
def test_under_checkpoint_and_scan(policy, kind):
    policies = jax.checkpoint_policies
    policy = policies.nothing_saveable if policy == "nothing" else policies.save_only_these_names("attention")
    row, args = packed([13, 9, 1], 32), inputs(32)
    tables = kind(*block_tables(row, 8, lanes=9))
    got = with_gradients(partial(two_layers, policy=policy))(*args, row, tables)

    def plain(q, k, v, row):
        for scale in (0.5, 1.5):
            q = q + dense_attend(q * scale, k, v, row)
        return q

    for x, y in zip(got, with_gradients(plain)(*args, row), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def count(jaxpr, name, steps=1):
    """How often a primitive runs, the steps of scans multiplied."""
    total = 0
    for eqn in jaxpr.eqns:
        inner = steps * eqn.params["length"] if eqn.primitive.name == "scan" else steps
        total += steps * (eqn.primitive.name == name)
        for value in eqn.params.values():
            for part in value if isinstance(value, tuple | list) else [value]:
                part = getattr(part, "jaxpr", part)
                if hasattr(part, "eqns"):
                    total += count(part, name, inner)
    return total


def test_matmuls_of_each_policy():
    """2 forward, 5 backward; "nothing" recomputes the forward pass, the name "attention" avoids that."""
    row, args = packed([13, 9, 1], 32), inputs(32)
    tables = block_tables(row, 8)
    visits = 2 * (4 + len(tables.lane_query))  # of two layers
    policies = jax.checkpoint_policies
    for policy, matmuls in ((policies.nothing_saveable, 9), (policies.save_only_these_names("attention"), 7)):
        jaxpr = jax.make_jaxpr(with_gradients(partial(two_layers, policy=policy)))(*args, row, tables)
        assert count(jaxpr.jaxpr, "dot_general") == matmuls * visits


@pytest.mark.parametrize("rows", ["documents", "causal"])
def test_memory_is_linear_in_tokens(rows):
    def temporary(n):
        row = packed([256] * (n // 256)) if rows == "documents" else causal(n)
        tables = block_tables(row, 64)
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs(n)]
        return blocked.lower(*shapes, row, tables).compile().memory_analysis().temp_size_in_bytes

    small, large = temporary(1024), temporary(4096)
    assert large < 4.4 * small
    assert large < 4096 * 4096  # a quarter of one head's score matrix, where the program handles four heads


@pytest.mark.parametrize("kind", [BlockTables, CountedTables])
@pytest.mark.parametrize("tensor", [False, True], ids=["data", "tensor"])
def test_under_shard_map(tensor, kind):
    """Two devices with a row each; or the query heads over two devices and one key/value head that both have."""
    rows = np.stack([packed([13, 9, 1], 32), packed([20, 12], 32)])
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    if tensor:
        args, rows = inputs(32, heads=4, kv_heads=1), rows[:1].repeat(2, axis=0)
        heads, shared = P(None, "x"), P()
        specs = (heads, shared, shared, heads)
    else:
        args = tuple(jnp.stack(pair) for pair in zip(inputs(32), inputs(32, seed=1), strict=True))
        specs = (P("x"),) * 4
    tables = kind(*map(np.stack, zip(*(all_lanes(row, 8) for row in rows), strict=True)))

    def local(q, k, v, w, row, tables):
        drop = (lambda x: x) if tensor else (lambda x: x[0])
        tables = jax.tree.map(lambda x: x[0], tables)
        result = with_gradients(attend)(*map(drop, (q, k, v, w)), row[0], tables)
        return result if tensor else tuple(x[None] for x in result)

    out = (specs[0], *specs[:3])
    table_spec = P() if tensor else P("x")
    got = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(*specs, table_spec, table_spec), out_specs=out))(
        *args, rows, tables
    )
    if tensor:
        wanted = dense(*args, rows[0])
    else:
        wanted = jax.tree.map(lambda *x: jnp.stack(x), *(dense(*(x[i] for x in args), rows[i]) for i in range(2)))
    for x, y in zip(got, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("backend", ["cpu", "neuron"])
def test_lowers_to_what_neuron_runs(backend, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    row = packed([13, 9, 1], 32)
    args = (*inputs(32, dtype=jnp.bfloat16), row, block_tables(row, 8))
    traced = with_gradients(lambda *args: attend(*args)).trace(*args)
    text = traced.lower(lowering_platforms=("neuron",)).as_text()
    for forbidden in ("scatter", "case", "sort", "reduce_window", "custom_call", "f64", "i64>"):
        assert forbidden not in text, forbidden
    assert count(traced.jaxpr.jaxpr, "while") == 0  # so every stablehlo.while comes from a scan
    assert text.count("stablehlo.while") == 4  # forward and backward: each block with itself, then the lanes
    assert count(traced.jaxpr.jaxpr, "gather") == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_heads": 3}, "4 query heads cannot share 3 key/value heads"),
        ({"n": 30}, r"a row of 30 tokens got tables of shape \(4,\)"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    q, k, v, _ = inputs(**{"n": 32} | change)
    with pytest.raises(ValueError, match=message):
        attend(q, k, v, jnp.asarray(causal(len(q))), block_tables(causal(32), 8))


def test_mixed_dtypes_and_tables_of_several_devices_are_refused():
    q, k, v, _ = inputs(32)
    row, tables = jnp.asarray(causal(32)), block_tables(causal(32), 8)
    with pytest.raises(ValueError, match="bfloat16: cast them to one compute dtype"):
        attend(q, k, v.astype(jnp.bfloat16), row, tables)
    with pytest.raises(ValueError, match=r"got tables of shape \(1, 4\)"):
        attend(q, k, v, row, jax.tree.map(lambda x: x[None], tables))
