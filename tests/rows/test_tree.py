"""Tree rows against a plain trie built token by token; budgets, groups, refusals, speed."""

import time
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtrl.rows.batch import Row, Sample, concat_rows, pad_visible
from jaxtrl.rows.blocks import needed_blocks
from jaxtrl.rows.pack import pack_rows
from jaxtrl.rows.sources import load_source
from jaxtrl.rows.tokenize import TokenizeOptions, tokenize_dataset
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


@given(forests(alphabet=200_000, depth=5))
def test_where_nothing_is_shared_the_row_is_the_packed_row(samples):
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
    assert len(rows) == len(plan.rows) == len(plan.needs.tokens) == plan.tree.rows
    for row, numbers, needs in zip(rows, plan.rows, plan.needs.each(), strict=True):
        assert numbers == sorted(numbers)
        members = [samples[i] for i in numbers]
        assert_equal(row, reference(members, plan.share[numbers].tolist()))
        assert [len(row.input_ids), len(row.slot_index), len(row.term_slot)] == list(needs[:3])
        assert needs[0] <= budget
        assert max_slots is None or needs[1] <= max_slots
        assert max_terms is None or needs[2] <= max_terms
        paths = recovered(row)
        assert all(s.input_ids.tolist() in paths for s in members if len(s.input_ids))
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


def test_what_is_shared_across_groups_is_what_pays():
    rng = np.random.default_rng(0)

    def branches(prefix, below, count=4):
        stem = rng.integers(0, 1000, prefix).tolist()
        return [sample([*stem, 1000 + i, *rng.integers(0, 1000, below - 1).tolist()], group=i) for i in range(count)]

    for prefix, below, shares in ((3, 2000, False), (1000, 2000, True), (3, 20, True)):
        plan = plan_trees(branches(prefix, below))
        assert len(set(plan.share.tolist())) == (1 if shares else 4)
        assert plan.unique_tokens == (prefix if shares else 4 * prefix) + 4 * below
    few = branches(3, 2000)
    assert len(set(plan_trees(few, min_shared_tokens=3).share.tolist())) == 1
    assert len(set(plan_trees(few, min_shared_tokens=4).share.tolist())) == 4
    assert len(set(plan_trees([s._replace(group=7) for s in few]).share.tolist())) == 1  # inside a group always


def test_sharing_is_decided_at_each_depth():
    """A short prefix of all does not pay, the longer ones below it do."""
    rng = np.random.default_rng(0)
    template = [1, 2, 3]
    systems = [template + rng.integers(10, 1000, 400).tolist() for _ in range(3)]
    samples = [sample(systems[i % 3] + rng.integers(10, 1000, 600).tolist(), group=i) for i in range(9)]
    plan = plan_trees(samples)
    assert plan.share.tolist() == [plan.share[i % 3] for i in range(9)]
    assert len(set(plan.share.tolist())) == 3
    assert plan.unique_tokens == 3 * 403 + 9 * 600


def test_groups_stay_together_and_large_ones_are_split_with_their_prefix():
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 1000, 40).tolist() for _ in range(5)]
    samples = [sample(prompts[g] + rng.integers(0, 1000, 15).tolist(), group=g) for g in range(5) for _ in range(4)]
    plan = plan_trees(samples, 256)
    assert plan.split_groups == plan.repeated_tokens == 0
    assert sorted(len(row) for row in plan.rows) == [4, 8, 8]
    assert plan.group_raw.tolist() == [220] * 5
    assert plan.group_unique.tolist() == [100] * 5
    assert plan.ratio == 2.2
    large = plan_trees(samples, 70)  # prompt and two completions
    assert large.split_groups == 5
    assert large.repeated_tokens == 5 * 40
    assert [len(row) for row in large.rows] == [2] * 10
    assert large.needs.tokens.tolist() == [70] * 10


def test_a_group_without_a_common_prefix_stays_together():
    samples = [sample([100 * i + j for j in range(10)], group=i % 4) for i in range(12)]
    plan = plan_trees(samples, 30)
    assert sorted(plan.rows) == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]
    assert plan.split_groups == 0


def test_rows_have_even_attention_costs_where_that_takes_no_more_rows():
    lengths = [40, 40, 20, 20, 10, 10, 10, 10]
    samples = [sample(range(1000 * i, 1000 * i + n), group=i) for i, n in enumerate(lengths)]
    plan = plan_trees(samples, 88)
    assert len(plan.rows) == 2
    assert [sorted(lengths[i] for i in row) for row in plan.rows] == [[10, 10, 20, 40]] * 2


def test_too_long_samples_are_refused_or_counted():
    samples = [sample(range(5)), sample(range(9)), sample(range(4))]
    with pytest.raises(ValueError, match=r"sample 1 has 9 tokens, more than a tree row holds \(token_budget=8\)"):
        tree_rows(samples, 8)
    with pytest.raises(ValueError, match=r"sample 0 has 4 trained tokens, .* \(max_terms=3\)"):
        tree_rows(samples, 16, max_terms=3)
    plan = plan_trees(samples, 8, too_long="drop")
    assert (plan.dropped, plan.rows, plan.raw_tokens, plan.share[1]) == ([1], [[0, 2]], 9, -1)
    (row,) = tree_rows(samples, 8, too_long="drop")
    assert_equal(row, reference([samples[0], samples[2]], [0, 0]))
    assert tree_rows(samples, 2, too_long="drop") == []
    assert plan_trees(samples, 2, too_long="drop").rows == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_budget": 0}, "token_budget is 0"),
        ({"min_shared_tokens": 0}, "min_shared_tokens is 0"),
        ({"token_budget": 4, "max_slots": 0}, "max_slots is 0"),
        ({"max_terms": 3}, "need a token_budget"),
        ({"too_long": "cut"}, "too_long is 'cut', give 'error' or 'drop'"),
    ],
)
def test_limits_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        tree_rows([sample([1, 2])], **options)


def test_samples_that_do_not_match_are_refused():
    with pytest.raises(ValueError, match="sample 1: loss_mask has 2 entries"):
        tree_rows([sample([5]), Sample(np.array([1, 2, 3]), np.ones(2, bool))])
    with pytest.raises(ValueError, match="sample 1 has no advantage but others"):
        tree_rows([sample([5, 6], advantage=1.0), sample([5, 6])])


def test_empty_samples_are_placed_and_nothing_makes_no_row():
    assert tree_rows([]) == tree_rows([], 8) == []
    assert plan_trees([]).ratio == 0
    samples = [sample([]), sample([4]), sample([]), sample([4, 5])]
    for budget in (None, 2):
        plan = plan_trees(samples, budget)
        assert plan.rows == [[0, 1, 2, 3]]
        assert_equal(tree_rows(samples, budget)[0], reference(samples, [0] * 4))
    (row,) = tree_rows([sample([]), sample([])], 4)
    assert len(row.input_ids) == len(row.term_slot) == 0
    assert row.denominator == 0


@given(forests(), limits)
def test_plans_are_deterministic_and_independent_of_integer_types(samples, drawn):
    wide = [s._replace(input_ids=s.input_ids.astype(np.int64)) for s in samples]
    for a, b in zip(tree_rows(samples, drawn[0]), tree_rows(wide, drawn[0]), strict=True):
        assert_same(a, b)
    assert plan_trees(samples, drawn[0]).rows == plan_trees(wide, drawn[0]).rows


@given(forests(), st.none() | st.integers(10, 30))
def test_costs_are_those_of_the_rows(samples, budget):
    plan = plan_trees(samples, budget, block_size=4)
    separate = pack_rows(samples, budget) if budget else [concat_rows(samples)] if samples else []
    for costs, rows in ((plan.tree, tree_rows(samples, budget, block_size=4)), (plan.packed, separate)):
        rows = [row for row in rows if len(row.input_ids)]
        visible = [pad_visible(row.visible_until, -(-len(row.input_ids) // 4) * 4) for row in rows]
        assert costs.tokens == sum(len(row.input_ids) for row in rows)
        assert costs.pairs == sum(int((row.visible_until - np.arange(len(row.visible_until))).sum()) for row in rows)
        assert costs.slots == sum(len(row.slot_index) for row in rows)
        assert abs(costs.blocks - sum(needed_blocks(v, 4) for v in visible)) <= (not rows)
    assert plan.tree.kv_bytes(8) == 8 * plan.tree.tokens


def test_deep_chains_take_no_recursion():
    """3,000 turns, each a sample that begins with all turns before it; the whole is longer than a row."""
    ids = np.arange(9000)
    samples = [sample(ids[: 3 * (i + 1)], [3 * i + 2]) for i in range(3000)]
    (row,) = tree_rows(samples)
    assert len(row.input_ids) == 9000
    assert row.term_sample.tolist() == list(range(3000))
    branches = [sample(np.r_[ids[: 3 * (i + 1)], 10_000 + i, np.arange(40)], [3 * i + 3]) for i in range(2000)]
    plan = plan_trees(branches, 8192)
    assert sorted(i for row in plan.rows for i in row) == list(range(2000))
    assert plan.needs.tokens.max() <= 8192


def agent_turns(shared_data, tokenizer, prefix_preserving):
    source = load_source(str(shared_data / "jsonl" / "agent_turns_sample.jsonl"))
    options = TokenizeOptions(max_length=None, prefix_preserving=prefix_preserving)
    dataset, _ = tokenize_dataset(source, tokenizer, options)
    groups = np.unique(source["trajectory"], return_inverse=True)[1].tolist()
    return [
        Sample(np.array(row["input_ids"], np.int32), np.array(row["loss_mask"]), group=group)
        for row, group in zip(dataset, groups, strict=True)
    ]


def test_real_agent_turns(shared_data, qwen3_tokenizer):
    """An exact trie of the stock template has 20,165 tokens (TRL: 20,238); the training template shares more."""
    stock = agent_turns(shared_data, qwen3_tokenizer, prefix_preserving=False)
    plan = plan_trees(stock, min_shared_tokens=1)
    assert (plan.raw_tokens, plan.unique_tokens) == (296_689, 20_165)
    kept = agent_turns(shared_data, qwen3_tokenizer, prefix_preserving=True)
    plan, every = plan_trees(kept), plan_trees(kept, min_shared_tokens=1)
    assert (plan.raw_tokens, plan.unique_tokens, every.unique_tokens) == (297_385, 17_253, 17_226)
    assert plan.tree.blocks < every.tree.blocks  # three template tokens and a few more for all trees: not worth it
    assert plan_trees([s._replace(group=i) for i, s in enumerate(kept)]).share.tolist() == plan.share.tolist()
    rows = tree_rows(kept, 8192)
    assert sum(len(row.term_slot) for row in rows) == 3991 == sum(int(s.loss_mask[1:].sum()) for s in kept)
    assert max(len(row.input_ids) for row in rows) <= 8192
    seconds = []
    for _ in range(5):
        start = time.process_time()
        tree_rows(kept)
        seconds.append(time.process_time() - start)
    assert plan.raw_tokens / min(seconds) > 10e6
