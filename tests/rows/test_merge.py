"""Few classes for many batches: the least padding of all choices, joins that hold their members, the cheapest first."""

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtrl.rows.batch import ShapeClass
from jaxtrl.rows.merge import best_sizes, cost, covering_classes, merge_classes
from jaxtrl.rows.needs import Needs

totals = st.lists(st.integers(0, 160), min_size=1, max_size=30).map(lambda drawn: np.array(drawn, np.int64))


def padded(tokens, sizes):
    return int(np.array(sizes)[np.searchsorted(sizes, tokens)].sum())


@given(totals, st.integers(1, 5))
def test_no_other_sizes_waste_less(tokens, count):
    sizes = best_sizes(tokens, count, 16)
    assert len(sizes) <= count
    assert sizes == sorted(set(sizes))
    assert all(size % 16 == 0 for size in sizes)
    possible = sorted({max(16, -(-int(n) // 16) * 16) for n in tokens})
    least = min(
        padded(tokens, [*choice, possible[-1]])
        for chosen in range(min(count, len(possible)))
        for choice in combinations(possible[:-1], chosen)
    )
    assert padded(tokens, sizes) == least


def test_known_sizes():
    tokens = np.array([10, 20, 20, 20, 100, 110, 112])
    assert best_sizes(tokens, 1, 16) == [112]
    assert best_sizes(tokens, 2, 16) == [32, 112]
    assert best_sizes(tokens, 3, 16) == [16, 32, 112]
    assert best_sizes(tokens, 9, 16) == [16, 32, 112]


@given(totals, st.integers(1, 4))
def test_covering_classes_hold_their_batches_with_no_lane_to_spare(tokens, count):
    needs = Needs(tokens, tokens // 2, tokens // 2, tokens // 7, np.ones_like(tokens))
    classes = covering_classes(needs, best_sizes(tokens, count, 16), 16)
    for need in needs.each():
        shape = next(shape for shape in classes if need.tokens <= shape.tokens)
        assert need.slots <= shape.slots <= shape.tokens
        assert need.lanes <= shape.lanes
    assert max(shape.lanes for shape in classes) == max(1, needs.lanes.max())


shapes = st.builds(ShapeClass, *(st.integers(1, 6).map(lambda n, k=k: n * k) for k in (128, 32, 32, 5)))
counted = st.dictionaries(shapes, st.integers(1, 50), min_size=1, max_size=9)


@given(counted, st.integers(1, 5))
def test_merged_classes_hold_every_class(counts, limit):
    merged = merge_classes(counts, limit)
    assert len(merged) == min(limit, len(counts))
    for shape in counts:
        assert any(all(map(int.__le__, shape, other)) for other in merged)
    for size in range(4):
        assert max(shape[size] for shape in merged) == max(shape[size] for shape in counts)
    assert merge_classes(dict(reversed(counts.items())), limit) == merged


@given(counted)
def test_one_merge_is_the_cheapest_pair(counts):
    if len(counts) < 2:
        return

    def total(classes):
        return sum(n * min(cost(o) for o in classes if all(map(int.__le__, s, o))) for s, n in counts.items())

    def joined(a, b):
        return [*(set(counts) - {a, b}), ShapeClass(*map(max, a, b))]

    def added(a, b):
        return sum(counts[shape] * (cost(ShapeClass(*map(max, a, b))) - cost(shape)) for shape in (a, b))

    best = min(added(a, b) for a, b in combinations(counts, 2))
    merged = merge_classes(counts, len(counts) - 1)
    assert any(
        Counter(merged) == Counter(joined(a, b)) and added(a, b) == pytest.approx(best, abs=1e-6)
        for a, b in combinations(counts, 2)
    )
    assert total(merged) <= total(list(counts)) + best + 1e-6


def test_what_a_class_costs():
    assert cost(ShapeClass(1000, 100, 400, 10)) == pytest.approx(1000 + 35 + 42.6, rel=1e-3)
    assert cost(ShapeClass(1000, 100, 400, 10), 256) == pytest.approx(1000 + 35 + 170.4, rel=1e-3)
