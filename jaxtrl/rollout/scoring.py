"""Reward functions, called for a whole group in threads: their arguments, their results, and what becomes of errors."""

import asyncio
import inspect
import logging
import numbers
import pickle
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32

from jaxtrl.rollout.groups import RewardFunction

NOT_PASSED = ("prompt", "completion", "completion_ids")  # columns that are arguments of their own, as in TRL
logger = logging.getLogger(__name__)


class Scores(NamedTuple):
    """`rewards[i, f]` of completion i by function f (NaN for None), and the completions for which a function raised."""

    rewards: Float32[np.ndarray, "G F"]
    failed: Bool[np.ndarray, " G"]


def function_name(function: RewardFunction) -> str:
    """`__name__`, or that of its type for an object; of the function inside a `functools.partial`."""
    function = getattr(function, "func", function)
    return getattr(function, "__name__", type(function).__name__)


def check_reward_functions(functions: Sequence[Any], columns: Sequence[str]) -> None:
    """Raises TypeError by name for what cannot be called with `prompts`, `completions`, `completion_ids`, the columns.

    Functions take further columns as `**kwargs`.
    """
    names = ("prompts", "completions", "completion_ids", *(name for name in columns if name not in NOT_PASSED))
    for function in functions:
        if not callable(function):
            raise TypeError(f"the reward function {function!r} is not callable: give a function")
        try:
            inspect.signature(function).bind(**dict.fromkeys(names))
        except TypeError as error:
            raise TypeError(
                f"the reward function {function_name(function)} cannot be called with {', '.join(names)} ({error}): "
                "let it take them, or **kwargs"
            ) from None
        except ValueError:
            continue  # a built-in without a signature


def check_picklable(functions: Sequence[RewardFunction]) -> None:
    """Raises TypeError by name for a function that another process cannot have (a lambda, a closure, of a notebook)."""
    for function in functions:
        try:
            pickle.dumps(function)
            if getattr(function, "__module__", None) == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
                raise TypeError("it is defined in an interactive session")
        except Exception as error:  # whatever __reduce__ raises
            raise TypeError(
                f"the reward function {function_name(function)} cannot be sent to a rollout worker ({error}): define "
                "it with def at the top level of a module, or use rollout=inline"
            ) from None


def score(
    functions: Sequence[RewardFunction],
    prompt: Any,
    texts: Sequence[str],
    completion_ids: Sequence[Any],
    columns: Mapping[str, Any],
    reported: set[str] | None = None,
) -> Scores:
    """Rewards of the completions of one prompt, each function called once for all of them.

    Arguments are TRL's: `prompts`, `completions` (texts, or a list of one assistant message each where the prompt is
    messages), `completion_ids`, and every column, all lists with an entry per completion. A function that raises is
    called again for one completion at a time, and those for which it raises are `failed`; where that is all of them,
    its exception is raised. Raises ValueError or TypeError naming a function that returns anything but a number or None
    for each completion. The first traceback of a function is logged, if its name is not in `reported`.
    """
    messages = not isinstance(prompt, str)
    completions = [[{"role": "assistant", "content": text}] if messages else text for text in texts]
    count = len(texts)
    kwargs: dict[str, list[Any]] = {
        "prompts": [prompt] * count,
        "completions": completions,
        "completion_ids": [list(map(int, ids)) for ids in completion_ids],
        **{name: [value] * count for name, value in columns.items() if name not in NOT_PASSED},
    }
    rewards, failed = np.full((count, len(functions)), np.nan, np.float32), np.zeros(count, bool)
    for column, function in enumerate(functions):
        values, raised = _call_group(function, kwargs, count, set() if reported is None else reported)
        rewards[:, column] = values
        failed |= raised
    return Scores(rewards, failed)


def _call_group(
    function: RewardFunction, kwargs: Mapping[str, list[Any]], count: int, reported: set[str]
) -> tuple[np.ndarray, np.ndarray]:
    try:
        result = _call(function, kwargs)
    except Exception as error:
        return _call_each(function, kwargs, count, error, reported)
    return _checked(function, result, count), np.zeros(count, bool)


def _call_each(
    function: RewardFunction, kwargs: Mapping[str, list[Any]], count: int, error: Exception, reported: set[str]
) -> tuple[np.ndarray, np.ndarray]:
    """One completion at a time; `error` is what the function raised for all together."""
    values, raised = np.full(count, np.nan, np.float32), np.zeros(count, bool)
    for i in range(count):
        try:
            result = _call(function, {name: entries[i : i + 1] for name, entries in kwargs.items()})
        except Exception as single:
            raised[i], error = True, single if not raised.any() else error
        else:
            values[i] = _checked(function, result, 1)[0]
    if raised.all():
        raise error
    name = function_name(function)
    if name not in reported:
        reported.add(name)
        trace = "".join(traceback.format_exception(error, chain=False))
        logger.warning(
            "The reward function %s raised for %d of %d completions, which are dropped and counted; the first one:\n%s",
            *(name, raised.sum(), count, trace),
        )
    return values, raised


def _call(function: RewardFunction, kwargs: Mapping[str, list[Any]]) -> Any:
    result = function(**kwargs)
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Any) -> Any:
    return await result


def _checked(function: RewardFunction, result: Any, count: int) -> Float32[np.ndarray, " count"]:
    name = function_name(function)
    if isinstance(result, str | bytes | Mapping) or not hasattr(result, "__len__") or not hasattr(result, "__iter__"):
        raise TypeError(f"the reward function {name} returned {result!r:.80}: it must return a list of numbers or None")
    values = list(result)
    if len(values) != count:
        raise ValueError(
            f"the reward function {name} returned {len(values)} rewards for {count} completions: return one for each"
        )
    return np.array([_number(name, value) for value in values], np.float32)


def _number(name: str, value: Any) -> float:
    if value is None:
        return float("nan")
    if getattr(value, "shape", None) == ():  # a NumPy, JAX or torch scalar
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise TypeError(f"the reward function {name} returned {value!r:.80}: each reward must be a number or None")
    if np.isinf(float(value)):
        raise ValueError(f"the reward function {name} returned {value}: each reward must be finite or None")
    return float(value)


class ScoringThreads:
    """Calls in the background; results come back as they end. Daemon threads: a function that sleeps delays no exit."""

    def __init__(self, threads: int):
        self._jobs: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self.pending = 0
        self._threads = threads
        for number in range(threads):
            threading.Thread(target=self._work, name=f"score-{number}", daemon=True).start()

    def submit(self, job: Callable[[], Any]) -> None:
        self.pending += 1
        self._jobs.put(job)

    def collect(self, wait: float | int = 0) -> list[Any]:
        """Results of the jobs that have ended; waits up to `wait` seconds for the first. Raises what a job raised."""
        out: list[Any] = []
        while self.pending:
            try:
                result, error = self._results.get(timeout=wait) if wait and not out else self._results.get_nowait()
            except queue.Empty:
                break
            self.pending -= 1
            if error is not None:
                raise error
            out.append(result)
        return out

    def close(self) -> None:
        """The threads end after what they are at."""
        for _ in range(self._threads):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._results.put((job(), None))
            except BaseException as error:  # raised where results are collected
                self._results.put((None, error))
