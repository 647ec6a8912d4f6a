"""Tree rows against a plain trie built token by token; budgets, groups, refusals, speed."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtrl.rows.batch import Row, Sample, concat_rows
from jaxtrl.rows.tree import plan_trees, tree_row, tree_rows


def sample(ids, trained=None, **columns) -> Sample:
    """A sample whose tokens at the indices `trained` (default: all) are trained."""
    mask = np.ones(len(ids), bool) if trained is None else np.isin(np.arange(len(ids)), trained)
    return Sample(np.array(ids, np.int64), mask, **columns)


def reference(samples, share) -> dict:
    """The row by the definition: nodes keyed by (tree, path), children in the order in which they appear."""
    children: dict = defaultdict(list)
    for s, tree in zip(samples, share, strict=True):
        for depth in range(len(s.input_ids)):
            parent, node = ((tree, *s.input_ids[:d].tolist()) for d in (depth, depth + 1))
            parent = parent if depth else ()
            if node not in children[parent]:
                children[parent].append(node)
    at, ends, order = {}, {}, []

    def visit(node):
        at[node] = len(order)
        order.append(node)
        for child in children[node]:
            visit(child)
        ends[node] = len(order)

    for root in children[()]:
        visit(root)
    slots, terms = set(), []
    for number, (s, tree) in enumerate(zip(samples, share, strict=True)):
        for depth in range(1, len(s.input_ids)):
            if s.loss_mask[depth]:
                node = (tree, *s.input_ids[: depth + 1].tolist())
                slots.add(at[node])
                terms.append((at[node], number, depth))
    slots = sorted(slots)
    return {
        "input_ids": [node[-1] for node in order],
        "position_ids": [len(node) - 2 for node in order],
        "visible_until": [ends[node] for node in order],
        "slot_index": [at[order[j][:-1]] for j in slots],
        "slot_target": [order[j][-1] for j in slots],
        "term_slot": [slots.index(j) for j, _, _ in terms],
        "term_sample": [number for _, number, _ in terms],
        **{
            name: None
            if not samples or getattr(samples[0], name) is None
            else [float(getattr(samples[number], name)[depth]) for _, number, depth in terms]
            for name in ("old_logp", "ref_logp", "sampler_logp")
        },
        "advantage": None
        if not samples or samples[0].advantage is None
        else [samples[number].advantage for _, number, _ in terms],
        "denominator": len(terms),
    }


def assert_equal(row: Row, expected: dict) -> None:
    for name, value in expected.items():
        got = getattr(row, name)
        assert (got is None) == (value is None), name
        assert value is None or np.asarray(got).tolist() == value, name
    assert row.weight.tolist() == [1.0] * len(row.term_slot)


def assert_same(a: Row, b: Row) -> None:
    for name, x, y in zip(Row._fields, a, b, strict=True):
        assert (x is None) == (y is None), name
        if x is not None:
            np.testing.assert_array_equal(x, y, err_msg=name)
            assert np.asarray(x).dtype == np.asarray(y).dtype, name


@st.composite
def forests(draw, alphabet=3, depth=8, groups=3, columns=st.booleans()) -> list[Sample]:
    """Samples over few tokens, so that ties, repeats, prefixes and forks at every depth are common."""
    with_columns = draw(columns)
    out: list[Sample] = []
    for _ in range(draw(st.integers(0, 10))):
        old = draw(st.sampled_from(out)).input_ids.tolist() if out and draw(st.booleans()) else []
        keep = old[: draw(st.integers(0, len(old)))]
        ids = (keep + draw(st.lists(st.integers(0, alphabet - 1), max_size=depth)))[: depth + 2]
        mask = draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
        logps = {}
        if with_columns:
            logps = {
                n: np.random.default_rng(len(out)).normal(size=len(ids)).astype(np.float32)
                for n in ("old_logp", "ref_logp")
            }
            logps["advantage"] = draw(st.sampled_from([-1.5, 0.0, 0.25, 2.0]))
        out.append(Sample(np.array(ids, np.int32), np.array(mask, bool), group=draw(st.integers(0, groups)), **logps))
    return out


@given(forests(), st.data())
def test_a_row_is_the_trie_of_its_samples(samples, data):
    share = data.draw(st.lists(st.integers(0, 2), min_size=len(samples), max_size=len(samples)))
    assert_equal(tree_row(samples, np.array(share, np.int64)), reference(samples, share))
    assert_equal(tree_row(samples), reference(samples, [0] * len(samples)))


@given(forests(alphabet=200_000, depth=5), st.integers(0, 40))
def test_where_nothing_is_shared_the_row_is_the_packed_row(samples, base):
    apart = [
        s._replace(input_ids=np.r_[np.int32(200_000 + i), s.input_ids][: len(s.input_ids)])
        for i, s in enumerate(samples)
    ]
    assert_same(tree_row(apart), concat_rows(apart))
    rows = tree_rows(apart)
    assert len(rows) == (1 if apart else 0)
    for row in rows:
        assert_same(row, concat_rows(apart))


def recovered(row: Row) -> list[list[int]]:
    """The path to every token, from position_ids and visible_until alone."""
    paths = []
    for i in range(len(row.input_ids)):
        seen = [j for j in range(i + 1) if row.visible_until[j] > i]
        assert row.position_ids[seen].tolist() == list(range(len(seen)))
        paths.append(row.input_ids[seen].tolist())
    return paths


limits = st.tuples(st.integers(10, 40), st.none() | st.integers(9, 20), st.none() | st.integers(9, 20))
thresholds = st.none() | st.integers(1, 6)


@given(forests(), limits, thresholds)
def test_rows_under_limits(samples, drawn, min_shared):
    budget, max_slots, max_terms = drawn
    options = {"min_shared_tokens": min_shared, "max_slots": max_slots, "max_terms": max_terms, "block_size": 4}
    plan, rows = plan_trees(samples, budget, **options), tree_rows(samples, budget, **options)
    assert sorted(i for row in plan.rows for i in row) == list(range(len(samples)))
    assert len(rows) == len(plan.rows) == len(plan.needs) == plan.tree.rows
    for row, numbers, needs in zip(rows, plan.rows, plan.needs.tolist(), strict=True):
        assert numbers == sorted(numbers)
        members = [samples[i] for i in numbers]
        assert_equal(row, reference(members, plan.share[numbers].tolist()))
        assert [len(row.input_ids), len(row.slot_index), len(row.term_slot)] == needs[:3]
        assert needs[0] <= budget
        assert max_slots is None or needs[1] <= max_slots
        assert max_terms is None or needs[2] <= max_terms
        paths = recovered(row)
        assert all(s.input_ids.tolist() in paths for s in members if len(s.input_ids))
    for s, other in zip(samples, samples[1:], strict=False):
        if s.group == other.group:
            i = samples.index  # noqa: F841
    by_group = defaultdict(set)
    for s, tree in zip(samples, plan.share.tolist(), strict=True):
        by_group[s.group].add(tree)
    assert all(len(trees) == 1 for trees in by_group.values())  # inside a group always


def test_c30():
    prompt = [5, 9, 12]
    samples = [sample(prompt + c, range(3, 9)) for c in ([3, 7, 1], [3, 20, 11, 4], [8, 2, 6])]
    (row,) = tree_rows(samples)
    assert row.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 4, 5, 6, 3, 4, 5]
    assert row.visible_until.tolist() == [12, 12, 12, 9, 6, 6, 9, 9, 9, 12, 12, 12]
    assert row.slot_index.tolist() == [2, 3, 4, 3, 6, 7, 2, 9, 10]
    assert row.slot_target.tolist() == [3, 7, 1, 20, 11, 4, 8, 2, 6]
    assert row.term_slot.tolist() == [0, 1, 2, 0, 3, 4, 5, 6, 7, 8]
    assert row.term_sample.tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]
