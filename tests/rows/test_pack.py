"""Packing: every token where it belongs, budgets held, TRL's bins, isolation, speed."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtrl.rows.batch import Sample, pad_visible
from jaxtrl.rows.blocks import count_lanes
from jaxtrl.rows.pack import STRATEGIES, cut_sample, pack_indices, pack_rows, packed_lanes

lengths_and_budget = st.tuples(st.lists(st.integers(0, 40), max_size=60), st.integers(1, 24))


def placed(packs) -> list[tuple[int, int]]:
    """(sample, token) of every placed token, sorted."""
    return sorted((i, t) for pack in packs for i, start, stop in pack for t in range(start, stop))


@given(lengths_and_budget, st.sampled_from(STRATEGIES))
def test_every_token_is_placed_once_and_budgets_hold(drawn, strategy):
    lengths, budget = drawn
    packs = pack_indices(np.array(lengths, np.int64), budget, strategy)
    kept = [min(n, budget) if strategy == "bfd" else n for n in lengths]
    assert placed(packs) == [(i, t) for i, n in enumerate(kept) for t in range(n)]
    for pack in packs:
        assert 0 < sum(stop - start for _, start, stop in pack) <= budget
        assert all(start < stop for _, start, stop in pack)


@given(lengths_and_budget)
def test_only_samples_over_the_budget_are_split(drawn):
    lengths, budget = drawn
    pieces = np.bincount(
        [i for pack in pack_indices(np.array(lengths, np.int64), budget, "bfd_split") for i, _, _ in pack],
        minlength=len(lengths),
    )
    assert pieces.tolist() == [-(-n // budget) for n in lengths]


@given(lengths_and_budget)
def test_wrapped_rows_are_full_and_in_order(drawn):
    lengths, budget = drawn
    packs = pack_indices(np.array(lengths, np.int64), budget, "wrapped")
    assert all(sum(stop - start for _, start, stop in pack) == budget for pack in packs[:-1])
    flat = [fragment for pack in packs for fragment in pack]
    assert flat == sorted(flat)


@given(lengths_and_budget, st.sampled_from(STRATEGIES))
def test_packing_is_deterministic(drawn, strategy):
    lengths, budget = drawn
    array = np.array(lengths, np.int64)
    assert pack_indices(array, budget, strategy) == pack_indices(array.astype(np.int32), budget, strategy)


@given(lengths_and_budget)
def test_bfd_puts_each_sample_where_it_leaves_least_space(drawn):
    """Against the definition: the tightest bin that fits, the oldest of equals, a new one only if none fits."""
    lengths, budget = drawn
    left: list[int] = []
    age: list[int] = []  # when the bin got the space that it has
    for when, n in enumerate(sorted((min(n, budget) for n in lengths if n), reverse=True)):
        fitting = [b for b, space in enumerate(left) if space >= n]
        best = min(fitting, key=lambda b: (left[b], age[b])) if fitting else len(left)
        if best == len(left):
            left.append(budget)
            age.append(when)
        left[best] -= n
        age[best] = when
    packs = pack_indices(np.array(lengths, np.int64), budget, "bfd")
    assert [budget - sum(stop - start for _, start, stop in pack) for pack in packs] == left


def test_known_packings():
    lengths = np.array([5, 2, 3, 1])
    assert pack_indices(lengths, 4, "bfd") == [[(0, 0, 4)], [(2, 0, 3), (3, 0, 1)], [(1, 0, 2)]]
    assert pack_indices(lengths, 4, "bfd_split") == [[(0, 0, 4)], [(2, 0, 3), (0, 4, 5)], [(1, 0, 2), (3, 0, 1)]]
    assert pack_indices(lengths, 4, "wrapped") == [
        [(0, 0, 4)],
        [(0, 4, 5), (1, 0, 2), (2, 0, 1)],
        [(2, 1, 3), (3, 0, 1)],
    ]


@pytest.mark.torch
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_bins_are_trls(strategy):
    pytest.importorskip("torch")
    datasets = pytest.importorskip("datasets")
    trl = pytest.importorskip("trl")
    rng = np.random.default_rng(0)
    lengths = rng.permutation(np.arange(1, 101))  # no ties: their order is TRL's sort's own affair
    samples = [[int(1000 * n + t) for t in range(n)] for n in lengths]
    theirs = trl.pack_dataset(datasets.Dataset.from_dict({"input_ids": samples}), 64, strategy)["input_ids"]
    ours = [
        [token for i, start, stop in pack for token in samples[i][start:stop]]
        for pack in pack_indices(lengths, 64, strategy)
    ]
    if strategy == "bfd_split":  # splitting makes ties
        assert len(ours) == len(theirs)
        assert sorted(map(len, ours)) == sorted(map(len, theirs))
    else:
        assert ours == list(theirs)


def samples_of(lengths: list[int]) -> list[Sample]:
    starts = np.cumsum([0, *lengths])
    return [Sample(np.arange(a, a + n), np.ones(n, bool)) for a, n in zip(starts, lengths, strict=False)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_documents_stay_isolated_and_fragments_restart(strategy):
    samples = samples_of([5, 2, 3, 1])
    for row, pack in zip(
        pack_rows(samples, 4, strategy), pack_indices(np.array([5, 2, 3, 1]), 4, strategy), strict=True
    ):
        at = 0
        for i, start, stop in pack:
            n = stop - start
            assert row.input_ids[at : at + n].tolist() == samples[i].input_ids[start:stop].tolist()
            assert row.position_ids[at : at + n].tolist() == list(range(n))
            assert (row.visible_until[at : at + n] == at + n).all()
            at += n
        assert len(row.term_slot) == at - len(pack)  # the first token of a fragment is not predicted


def test_a_cut_sample_keeps_its_columns():
    whole = Sample(np.arange(4), np.ones(4, bool), advantage=2.0, old_logp=np.arange(4, dtype=np.float32), group=3)
    cut = cut_sample(whole, 1, 3)
    assert cut.input_ids.tolist() == [1, 2]
    assert cut.old_logp is not None
    assert cut.old_logp.tolist() == [1, 2]
    assert (cut.advantage, cut.group, cut.ref_logp) == (2.0, 3, None)
    assert cut_sample(whole, 0, 4) is whole


@given(st.lists(st.integers(0, 90), max_size=40), st.integers(1, 70), st.sampled_from(STRATEGIES))
def test_lanes_of_packs_are_those_of_their_rows(lengths, budget, strategy):
    samples = samples_of(lengths)
    packs = pack_indices(np.array(lengths, np.int64), budget, strategy)
    tokens = -(-budget // 8) * 8
    visible = [pad_visible(row.visible_until, tokens) for row in pack_rows(samples, budget, strategy)]
    lanes = packed_lanes(packs, budget, 8)
    assert [max(1, n) for n in lanes.tolist()] == [count_lanes(one, 8) for one in visible]
    if packs:  # several packs in one row
        together = np.concatenate([one + tokens * i for i, one in enumerate(visible)])
        assert max(1, lanes.sum()) == count_lanes(together, 8)


def test_refusals():
    with pytest.raises(ValueError, match="packing_strategy is 'ffd': give one of bfd, bfd_split, wrapped"):
        pack_indices(np.array([1]), 4, "ffd")
    with pytest.raises(ValueError, match="token budget of packed rows is 0"):
        pack_indices(np.array([1]), 0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_packing_many_samples_takes_seconds(strategy):
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 0.8, 300_000).astype(np.int64), 1, 20_000)
    start = time.process_time()
    packs = pack_indices(lengths, 2048, strategy)
    assert time.process_time() - start < 10
    expected = np.minimum(lengths, 2048).sum() if strategy == "bfd" else lengths.sum()
    assert expected / (2048 * len(packs)) > 0.999
