"""`LocalWorkers`: the same groups as inline, and what happens when something goes wrong. Real processes, tiny model."""

import os
import re
import signal
import time

import jax
import numpy as np
import pytest

from jaxtrl.model.qwen3 import model_params
from jaxtrl.rollout.groups import Group, RolloutError
from jaxtrl.rollout.pacing import Pacing, StalenessCounter, prompt_index
from jaxtrl.rollout.places import Place
from jaxtrl.rollout.workers import LocalWorkers
from tests.rollout.models import fixture_t
from tests.rollout.rewards_for_tests import (
    make_prompts,
    make_setup,
    processes_with,
    raises,
    sleeps,
    sleeps_for_first,
    where,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
PROMPTS = make_prompts(5)


def params_of(version: int):
    return jax.tree.map(lambda x: x * (1 + 0.05 * version), model_params(fixture_t()))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Workers after the first load their programs."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def make(tmp_path, cache):
    """Workers that end with the test, and leave nothing behind."""
    made = []

    def one(*functions, workers: int = 1, total: int = 12, pacing=None, place=Place(), **options) -> LocalWorkers:
        pacing = Pacing(2, total, 1) if pacing is None else pacing
        options = {"weights_folder": tmp_path / "weights", "places": [place] * workers, **options}
        setup = make_setup(*functions, compile_cache=str(cache))
        made.append(LocalWorkers(setup, pacing, PROMPTS, **options))
        return made[-1]

    yield one
    for rollout in made:
        rollout.close()
    assert processes_with(os.getpid()) == [] or all(
        "resource_tracker" in _command(p) for p in processes_with(os.getpid())
    )
    assert list(tmp_path.glob("weights/*")) == []


def _command(pid: int) -> str:
    with open(f"/proc/{pid}/cmdline", encoding="utf-8") as file:
        return file.read()


def numbers(groups: list[Group]) -> list[int]:
    return [group.number for group in groups]


def wait_until(condition, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)


def test_resuming_samples_unfinished_groups_only(make):
    rollout = make(total=8)
    rollout.start(params_of(1), 1, 2, ())
    wait_until(lambda: numbers(rollout.finished()) == [2, 3, 4, 5])
    kept = [group for group in rollout.finished() if group.number != 3]
    rollout.close()
    again = make(total=8)
    again.start(params_of(1), 1, 2, kept)
    groups = again.take(4)
    assert numbers(groups) == [2, 3, 4, 5]
    assert groups[0] is kept[0]
    assert again.metrics()["rollout/sampled_tokens"] <= 2 * 3 * 6  # group 3; a heartbeat may not have told it yet


def test_two_workers_give_every_group_once_in_order_within_the_bound(make):
    """Six updates with new weights, one group dropped by a filter, an evaluation between."""
    rollout = make(workers=2)
    rollout.start(params_of(0), 0, 0, ())
    taken: list[Group] = []
    counter = StalenessCounter(1)
    for step in range(5):
        groups = rollout.take(2)
        if step == 1:
            rollout.release(1)
            groups = [groups[0], *rollout.take(1)]
            taken += rollout.take(0)
        for group in groups:
            counter.add(group.first_version, step)
        taken += groups
        rollout.publish(params_of(step + 1), step + 1)
        if step == 2:
            evaluated = rollout.evaluate(PROMPTS[:3], 2)
    rest = rollout.take(5)
    assert numbers(taken) == [0, 1, 2, 4, 5, 6, 7, 8, 9, 10]
    assert numbers(rest) == [11]
    assert counter.max == 1
    for group in taken + rest:
        prompt = PROMPTS[prompt_index(group.number, 5, 5)]
        assert (group.row, group.worker) == (prompt.row, group.number % 2)
        assert len(group.completions) == 3
        expected = [[c.token_ids[0], np.nan if prompt.row % 2 else prompt.row] for c in group.completions]
        np.testing.assert_array_equal(group.rewards, np.array(expected, np.float32))
    assert [(group.number, group.row, len(group.completions)) for group in evaluated] == [
        (0, 0, 2),
        (1, 1, 2),
        (2, 2, 2),
    ]
    assert {group.first_version for group in evaluated} == {3}
    metrics = rollout.metrics()
    assert metrics["rollout/finished_groups"] == metrics["rollout/taken_groups"] == 12
    assert metrics["rollout/wait_seconds"] > 0
    wait_until(lambda: [worker.loaded for worker in rollout._workers] == [5, 5], 20)
    assert rollout.finished() == []


def test_a_killed_worker_is_named_within_5_seconds(make):
    rollout = make(workers=2)
    rollout.start(params_of(0), 0, 0, ())
    rollout.take(2)
    process = rollout._workers[1].process
    os.kill(process.pid, signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(RolloutError, match=f"rollout worker 1 .process {process.pid}. was killed by SIGKILL"):
        _go_on(rollout)
    assert time.monotonic() - killed < 5
    start = time.monotonic()
    rollout.close()
    assert time.monotonic() - start < 12


def _go_on(rollout: LocalWorkers) -> None:
    for step in range(1, 6):
        rollout.publish(params_of(step), step)
        rollout.take(2)


def test_a_hung_worker_is_named(make):
    rollout = make(heartbeat_stale_after_s=2.0)
    rollout.start(params_of(0), 0, 0, ())
    rollout.take(2)
    os.kill(rollout._workers[0].process.pid, signal.SIGSTOP)
    rollout.publish(params_of(1), 1)
    start = time.monotonic()
    with pytest.raises(RolloutError, match=r"has been silent for . s, longer than heartbeat_stale_after_s=2"):
        rollout.take(4)
    assert time.monotonic() - start < 5
    rollout.close()
    assert time.monotonic() - start < 12


def test_a_function_that_raises_for_all_stops_the_run_with_its_traceback(make):
    rollout = make(raises)
    rollout.start(params_of(0), 0, 0, ())
    with pytest.raises(RolloutError, match=r"(?s)rollout worker 0 failed:.*in raises.*this reward function always"):
        rollout.take(2)


def test_a_truncated_weights_file_is_named(make):
    rollout = make()
    rollout.start(params_of(0), 0, 0, ())
    rollout.take(2)
    write = rollout._weights.write

    def cut(params, version):
        path = write(params, version)
        path.write_bytes(path.read_bytes()[:1000])
        return path

    rollout._weights.write = cut
    rollout.publish(params_of(1), 1)
    with pytest.raises(RolloutError, match=r"000000000001/model.safetensors is truncated"):
        rollout.take(4)


def test_a_full_queue_stops_sampling_but_not_the_heartbeat(make):
    rollout = make(pacing=Pacing(2, 12, 9, queue_groups=3), heartbeat_stale_after_s=4.0)
    rollout.start(params_of(0), 0, 0, ())
    wait_until(lambda: len(rollout.finished()) == 3)
    time.sleep(5)  # a trainer that is busy for longer than the limit
    assert numbers(rollout.finished()) == [0, 1, 2]
    assert numbers(rollout.take(2)) == [0, 1]
    assert numbers([group for _ in range(5) for group in rollout.take(2)]) == list(range(2, 12))


def test_a_slow_reward_function_holds_up_only_its_group(make):
    """Group 0 of an unshuffled order is scored last; others are finished before, and are taken after it."""
    rollout = make(sleeps_for_first, shuffle=False)
    rollout.start(params_of(0), 0, 0, ())
    groups = rollout.take(4)
    assert numbers(groups) == [0, 1, 2, 3]
    assert groups[0].scored - groups[0].finished >= 1.0
    assert groups[1].scored < groups[0].scored


def test_a_sleeping_reward_function_delays_no_end(make):
    rollout = make(sleeps)
    rollout.start(params_of(0), 0, 0, ())
    wait_until(lambda: rollout._workers[0].counters.get("completions", 0) >= 12)
    start = time.monotonic()
    rollout.close()
    assert time.monotonic() - start < 6


def test_a_worker_runs_where_it_is_placed(make):
    before = os.sched_getaffinity(0)
    rollout = make(where, place=Place({"JAXTRL_TEST_PLACE": "1"}, frozenset([0])))
    rollout.start(params_of(0), 0, 0, ())
    assert rollout.take(1)[0].rewards[0, 0] == 1
    with open(f"/proc/{rollout._workers[0].process.pid}/environ", encoding="utf-8") as file:
        assert "JAXTRL_TEST_PLACE=1" in file.read()
    assert os.sched_getaffinity(0) == before
    assert "JAXTRL_TEST_PLACE" not in os.environ


def test_a_lambda_is_refused_before_anything_starts(make):
    with pytest.raises(TypeError, match=re.escape("the reward function <lambda> cannot be sent to a rollout worker")):
        make(lambda **_: [])
