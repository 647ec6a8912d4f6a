"""The queue of groups: admission, order, resuming, and that nothing is thrown away."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtrl.rollout.group_queue import GroupQueue, queue_metrics
from jaxtrl.rollout.groups import Group
from jaxtrl.rollout.pacing import Pacing, prompt_index
from jaxtrl.rollout.requests import Completion
from tests.rollout.rewards_for_tests import make_prompts


def make_group(number: int, version: int = 0) -> Group:
    ids, logps = np.array([1], np.int32), np.zeros(1, np.float32)
    completion = Completion(0, 0, ids, logps, logps, np.array([version], np.int32), "length")
    rewards, failed = np.zeros((1, 1), np.float32), np.zeros(1, bool)
    return Group(number, 0, [1], (completion,), ("1",), rewards, failed, 0.0, 0.0, 0.0)


def make_queue(total: int = 20, prompts: int = 6, **pacing) -> GroupQueue:
    return GroupQueue(
        Pacing(**{"groups_per_step": 2, "max_staleness": 1, **pacing}, total_groups=total), make_prompts(prompts), 3, 7
    )


def numbers(items) -> list[int]:
    return [item.number for item in items]


@given(st.data())
def test_groups_finish_in_any_order_and_are_taken_in_theirs(data):
    queue = make_queue(total=17)
    open_tasks: list[int] = []
    taken: list[int] = []
    while len(taken) < 17:
        tasks = queue.admit()
        for task in tasks:
            assert task.prompt.row == prompt_index(task.number, 7, 6)
        open_tasks += numbers(tasks)
        count = queue.count(2)
        while not queue.is_ready(count):
            number = data.draw(st.sampled_from(open_tasks))
            open_tasks.remove(number)
            queue.add(make_group(number))
        taken += numbers(queue.take(count))
        assert queue.finished_total == queue.taken_total + len(queue.kept)
        if data.draw(st.booleans()):
            queue.dropped += 1
        queue.version += 1
    assert taken == list(range(17))
    assert queue.admit() == []
    assert queue.count(2) == 0


def test_what_is_left_of_an_epoch_can_be_skipped():
    """One of its groups is finished, one under way, the rest not begun; the run is as much longer as it is told."""
    queue = make_queue(total=8, prompts=6, groups_per_step=1, max_staleness=2)
    assert numbers(queue.admit()) == [0, 1, 2]
    for number in (0, 1):
        queue.add(make_group(number))
    assert numbers(queue.take(1)) == [0]
    queue.version = 1
    queue.skip(5, 4)
    tasks = queue.admit()
    assert numbers(tasks) == [6, 7, 8], "as many ahead as before"
    assert [task.prompt.row for task in tasks] == [prompt_index(number, 7, 6) for number in (6, 7, 8)]
    queue.add(make_group(2))
    assert numbers(queue.finished()) == []
    assert (queue.finished_total, queue.taken_total, queue.skipped_total) == (3, 1, 2)
    with pytest.raises(AssertionError, match="came twice"):
        queue.add(make_group(2))
    for number in (6, 7, 8):
        queue.add(make_group(number))
    assert numbers(queue.take(3)) == [6, 7, 8]
    queue.version = 12
    assert numbers(queue.admit()) == [9, 10, 11]


@given(st.integers(0, 8), st.sets(st.integers(0, 5)))
def test_a_resumed_run_samples_what_is_not_finished(step, offsets):
    """Finished groups of the checkpoint come back, the others are sampled again, all exactly once."""
    queue, following = make_queue(), 2 * step
    kept = [make_group(following + i) for i in offsets if following + i < 20]
    queue.start(step, following, kept)
    assert queue.finished() == sorted(kept, key=lambda group: group.number)
    sampled = numbers(queue.admit())
    limit = queue.limit
    assert limit == min(20, 2 * (step + 2))
    assert sorted(sampled + [n for n in numbers(kept) if n < limit]) == list(range(following, limit))
    queue.version += 10
    rest = numbers(queue.admit())
    assert sorted(sampled + rest + numbers(kept)) == list(range(following, 20))


def test_resuming_counts_groups_that_were_dropped():
    queue = make_queue()
    queue.start(3, 9, [])  # 6 groups trained, so 3 of 9 were dropped
    assert queue.dropped == 3
    assert queue.limit == 2 * (3 + 2) + 3
    with pytest.raises(ValueError, match="group 8 was trained already: the next one is 9"):
        queue.start(3, 9, [make_group(8)])


def test_dropped_groups_admit_as_many_more():
    queue = make_queue()
    assert numbers(queue.admit()) == [0, 1, 2, 3]
    queue.dropped += 1
    assert numbers(queue.admit()) == [4]


def test_a_full_queue_admits_nothing_until_groups_are_taken():
    queue = make_queue(max_staleness=9, queue_groups=3)
    assert numbers(queue.admit()) == [0, 1, 2]
    for number in (2, 0, 1):
        queue.add(make_group(number))
    assert queue.admit() == []
    assert numbers(queue.take(2)) == [0, 1]
    assert numbers(queue.admit()) == [3, 4]


def test_what_cannot_come_is_an_error():
    queue = make_queue()
    queue.admit()
    sentence = "5 groups are asked for, but only 4 are admitted with weights of version 0: publish newer weights first"
    with pytest.raises(RuntimeError, match=re.escape(sentence)):
        queue.count(5)
    with pytest.raises(AssertionError, match="group 4 came twice or was not asked for"):
        queue.add(make_group(4))
    queue.add(make_group(3))
    with pytest.raises(AssertionError, match="group 3 came twice"):
        queue.add(make_group(3))
    with pytest.raises(ValueError, match="there are no prompts"):
        make_queue(prompts=0)


def test_metrics_give_means_and_totals():
    queue = make_queue()
    queue.admit()
    queue.add(make_group(0))
    metrics = queue_metrics(queue, {"queue_seconds": 6.0, "taken": 3, "tokens": 12})
    assert metrics["rollout/queue_depth"] == 1
    assert metrics["rollout/queue_seconds"] == 2.0
    assert metrics["rollout/sampled_tokens"] == 12
    assert metrics["rollout/admission_limit"] == 4
