"""Reward functions: what they are given, what they may return, and what happens when they raise."""

import asyncio
import functools
import re
import sys
import threading
import time
import types

import numpy as np
import pytest

from jaxtrl.rollout.scoring import (
    ScoringThreads,
    check_picklable,
    check_reward_functions,
    function_name,
    score,
)

TEXTS = ["a", "bb", "ccc"]
IDS = [np.array([1]), np.array([2, 2]), np.array([3, 3, 3])]


def length(completions, **_):
    return [float(len(text)) for text in completions]


async def slow_half(prompts, completions, completion_ids, answer, **_):
    await asyncio.sleep(0.001)
    return [None if len(ids) == 2 else a for ids, a in zip(completion_ids, answer, strict=True)]


def raises_for_bb(completions, **_):
    if "bb" in completions:
        raise RuntimeError("no bb please")
    return [1.0] * len(completions)


def raises(**_):
    raise KeyError("always")


def test_rewards_of_sync_and_async_functions_with_none():
    rewards, failed = score([length, slow_half], "p", TEXTS, IDS, {"answer": 5, "prompt": "not passed"})
    np.testing.assert_array_equal(rewards, np.array([[1, 5], [2, np.nan], [3, 5]], np.float32))
    assert not failed.any()


@pytest.mark.parametrize("prompt", ["2+2=", [{"role": "user", "content": "2+2="}]], ids=["text", "messages"])
def test_arguments_are_those_of_trl(prompt):
    seen = {}

    def keep(**kwargs):
        seen.update(kwargs)
        return [0] * 3

    score([keep], prompt, TEXTS, IDS, {"answer": "4", "completion": "x", "completion_ids": [1], "prompt": prompt})
    wrapped = TEXTS if isinstance(prompt, str) else [[{"role": "assistant", "content": text}] for text in TEXTS]
    assert seen == {
        "prompts": [prompt] * 3,
        "completions": wrapped,
        "completion_ids": [[1], [2, 2], [3, 3, 3]],
        "answer": ["4"] * 3,
    }
    assert all(type(token) is int for ids in seen["completion_ids"] for token in ids)


def test_completions_for_which_a_function_raises_are_failed_and_logged_once(caplog):
    reported = set()
    rewards, failed = score([length, raises_for_bb], "p", TEXTS, IDS, {}, reported)
    score([raises_for_bb], "p", TEXTS, IDS, {}, reported)
    assert failed.tolist() == [False, True, False]
    np.testing.assert_array_equal(rewards, np.array([[1, 1], [2, np.nan], [3, 1]], np.float32))
    (record,) = caplog.records
    assert "raises_for_bb raised for 1 of 3 completions, which are dropped and counted" in record.getMessage()
    assert "no bb please" in record.getMessage()


def test_a_function_that_raises_for_all_raises():
    with pytest.raises(KeyError, match="always"):
        score([length, raises], "p", TEXTS, IDS, {})


@pytest.mark.parametrize(
    ("result", "kind", "message"),
    [
        ([1.0], ValueError, "wrong returned 1 rewards for 3 completions"),
        (1.0, TypeError, "wrong returned 1.0: it must return a list"),
        ("abc", TypeError, "wrong returned 'abc': it must return a list"),
        ([1, "2", 3], TypeError, "wrong returned '2': each reward must be a number or None"),
        ([1, float("inf"), 3], ValueError, "wrong returned inf: each reward must be finite or None"),
        ([[1], [2], [3]], TypeError, "wrong returned [1]: each reward"),
    ],
)
def test_a_wrong_result_names_the_function(result, kind, message):
    def wrong(**_):
        return result

    with pytest.raises(kind, match=re.escape(message)):
        score([wrong], "p", TEXTS, IDS, {})


def test_numbers_of_other_libraries_are_rewards():
    jnp = pytest.importorskip("jax.numpy")
    rewards, _ = score(
        [lambda **_: jnp.arange(3.0), lambda **_: np.arange(3), lambda **_: [True, False, 2]], "p", TEXTS, IDS, {}
    )
    np.testing.assert_array_equal(rewards, np.array([[0, 0, 1], [1, 1, 0], [2, 2, 2]], np.float32))


def test_unpicklable_functions_are_refused_by_name():
    def closure(**_):
        return []

    check_picklable([length, slow_half, functools.partial(length, scale=2)])
    for function, name in ((closure, "closure"), (lambda **_: [], "<lambda>")):
        with pytest.raises(TypeError, match=f"the reward function {name} cannot be sent to a rollout worker"):
            check_picklable([length, function])


def test_a_function_of_a_notebook_is_refused(monkeypatch):
    def typed(**_):
        return []

    main = types.ModuleType("__main__")
    main.typed = typed
    typed.__module__, typed.__qualname__ = "__main__", "typed"
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(TypeError, match=r"typed cannot be sent to a rollout worker .it is defined in an interactive"):
        check_picklable([typed])
    main.__file__ = "train.py"
    check_picklable([typed])


def test_a_signature_without_room_is_refused_by_name():
    def narrow(completions):
        return [0.0] * len(completions)

    check_reward_functions([length, slow_half], ["answer", "prompt"])
    with pytest.raises(TypeError, match="narrow cannot be called with prompts, completions, completion_ids, answer"):
        check_reward_functions([narrow], ["answer", "prompt"])
    with pytest.raises(TypeError, match="'text' is not callable"):
        check_reward_functions(["text"], [])
    with pytest.raises(TypeError, match=r"slow_half cannot be called .*missing a required argument: 'answer'"):
        check_reward_functions([slow_half], [])


def test_names():
    class Judge:
        def __call__(self, **_):
            return []

    assert [function_name(f) for f in (length, Judge(), functools.partial(length))] == ["length", "Judge", "length"]


def test_threads_run_at_the_same_time_and_raise_where_results_are_collected():
    threads = ScoringThreads(2)
    meet = threading.Barrier(2, timeout=10)
    for _ in range(2):
        threads.submit(meet.wait)
    found = []
    while threads.pending:
        found += threads.collect(wait=1)
    assert sorted(found) == [0, 1]
    assert threads.collect(wait=1) == []
    threads.submit(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        threads.collect(wait=10)
    threads.close()


def test_collect_does_not_wait_for_slow_jobs():
    threads, release = ScoringThreads(1), threading.Event()
    threads.submit(release.wait)
    start = time.monotonic()
    assert threads.collect() == threads.collect(wait=0.01) == []
    assert time.monotonic() - start < 5
    release.set()
    assert threads.collect(wait=10) == [True]
