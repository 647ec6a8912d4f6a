"""Admission: the staleness bound holds and is reached, nothing waits for ever, order and seeds are pure functions."""

import re
from itertools import islice

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jaxtrl.rollout.pacing import Pacing, StalenessCounter, group_seed, prompt_index, prompt_indices, stripe
from jaxtrl.rows.order import epoch_order

small = st.integers(1, 4)


@st.composite
def pacings(draw) -> Pacing:
    step, iterations, sync = draw(small), draw(small), draw(small)
    queue = draw(st.none() | st.integers(step, 5 * step))
    try:
        return Pacing(step, draw(st.integers(0, 40)), draw(st.integers(0, 8)), iterations, sync, queue)
    except ValueError:
        assume(False)
        raise


@given(pacings(), st.data())
def test_every_run_ends_within_the_bound_and_trains_each_group_once(pacing, data):
    """A trainer that publishes as it says, drops at random, and takes what it needs; sampling as fast as admitted."""
    version = step = dropped = taken = 0
    first_version: list[int] = []
    counter = StalenessCounter(pacing.max_staleness)
    trained: list[int] = []

    def sample() -> None:
        limit = pacing.limit(version, dropped, taken)
        assert pacing.queue_groups is None or limit - taken <= pacing.queue_groups
        first_version.extend([version] * (limit - len(first_version)))

    while taken < pacing.total_groups:
        batch: list[int] = []
        while len(batch) < pacing.groups_per_step and taken < pacing.total_groups:
            sample()
            assert taken < len(first_version), "the trainer waits for a group that is never admitted"
            number, taken = taken, taken + 1
            if data.draw(st.integers(0, 3)) == 0:
                dropped += 1
            else:
                batch.append(number)
        for _ in range(pacing.num_iterations if batch else 0):
            for number in batch:
                counter.add(first_version[number], step)
            step += 1
            if step % pacing.weight_sync_steps == 0:
                version = step
        trained += batch
    assert len(first_version) == taken == pacing.total_groups
    assert trained == sorted(set(trained))
    assert len(trained) == taken - dropped
    assert counter.max <= pacing.max_staleness


@given(small, small, st.integers(0, 6))
def test_admission_is_as_early_as_the_bound_allows(step, iterations, extra):
    """The group at the limit would be one step too old, the one before it is not."""
    pacing = Pacing(step, 10**6, iterations - 1 + extra, iterations)
    for version in range(12):
        limit = pacing.limit(version)
        last = (limit - 1) // step * iterations + iterations - 1
        assert last - version <= pacing.max_staleness < last + iterations - version


def test_on_policy_admits_one_batch_at_a_time():
    pacing = Pacing(groups_per_step=3, total_groups=8, max_staleness=0)
    assert [pacing.limit(version) for version in range(4)] == [3, 6, 8, 8]
    assert pacing.limit(0, dropped=2) == 5
    assert pacing.trained_before(2) == 6


@pytest.mark.parametrize(("limit", "kept"), [(0, [0]), (1, [0, 1])])
def test_c29_lags_of_groups_started_at_version_3(limit, kept):
    """Trained at 3, 4, 5: lags 0, 1, 2. Lag counts to the step of training, however long ago the group was finished."""
    lags = [StalenessCounter(9).add(3, step) for step in (3, 4, 5, 6)]
    assert lags == [0, 1, 2, 3]
    allowed = []
    for lag in lags:
        try:
            allowed.append(StalenessCounter(limit).add(3, 3 + lag))
        except AssertionError:
            continue
    assert allowed == kept
    pacing = Pacing(groups_per_step=4, total_groups=100, max_staleness=limit)
    assert pacing.limit(3) == (3 + limit + 1) * 4  # (limit + 1) batches in flight from batch 3 on


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_staleness": 2, "weight_sync_steps": 4}, "raise max_staleness to 3"),
        ({"max_staleness": 0, "num_iterations": 2}, "raise max_staleness to 1"),
        ({"max_staleness": 2, "num_iterations": 2, "weight_sync_steps": 3}, "raise max_staleness to 3"),
        ({"queue_groups": 3}, "the queue holds 3 groups, but a step takes 4: raise queue_maxsize"),
        ({"max_staleness": -1}, "max_staleness is -1: it must be a whole number from 0 on"),
        ({"weight_sync_steps": 0}, "weight_sync_steps is 0: it must be a whole number from 1 on"),
    ],
)
def test_what_would_wait_for_ever_is_refused(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Pacing(**{"groups_per_step": 4, "total_groups": 10, **fields})


def test_the_counter_refuses_a_group_of_the_future():
    with pytest.raises(AssertionError, match="a group of version 5 is trained at step 4"):
        StalenessCounter(3).add(5, 4)


@given(st.integers(0, 5), st.integers(1, 9), st.integers(0, 30), st.booleans())
def test_prompts_come_in_the_order_of_their_epoch(seed, count, start, shuffle):
    expected = [int(i) for epoch in range(8) for i in epoch_order(seed, epoch, count, shuffle)]
    some = list(islice(prompt_indices(start, seed, count, shuffle), 2 * count))
    assert some == [prompt_index(start + i, seed, count, shuffle) for i in range(2 * count)]
    if start + 2 * count <= len(expected):
        assert some == expected[start : start + 2 * count]


def test_stripes_share_groups_evenly():
    assert [stripe(number, 3) for number in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_seeds_differ_by_run_group_and_purpose():
    seeds = {group_seed(seed, g, e) for seed in (0, 1, -1) for g in range(50) for e in (False, True)}
    assert len(seeds) == 300
    assert group_seed(42, 7) == group_seed(42, 7)
    assert all(0 <= seed < 2**64 for seed in seeds)
