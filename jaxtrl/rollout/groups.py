"""What trainer and rollout workers exchange: prompts, groups of completions, and the interface between the two.

A *group* is `num_generations` completions of one prompt. Group g of a run is the g-th that is admitted; groups are
trained in that order (DESIGN.md section 10).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float32

from jaxtrl.rollout.requests import Completion

RewardFunction = Callable[..., Any]  # (prompts, completions, completion_ids, **columns) -> list[float | None], or async


class Prompt(NamedTuple):
    """One row of the data: token ids, the prompt as it stands there (text or messages), and the other columns."""

    row: int
    ids: list[int]
    prompt: Any
    columns: dict[str, Any]


class Group(NamedTuple):
    """The completions of one prompt and what they earned.

    `completions` are in the order of their generation index. `rewards[i, f]` is what function f gave completion i, NaN
    for None. `failed[i]`: some function raised for completion i, which is then not trained (and counted). Times are
    seconds of `time.time()`.
    """

    number: int
    row: int
    prompt_ids: list[int]
    completions: tuple[Completion, ...]
    texts: tuple[str, ...]  # of the completions, without special tokens
    rewards: Float32[np.ndarray, "G F"]
    failed: Bool[np.ndarray, " G"]
    admitted: float
    finished: float  # sampled
    scored: float
    worker: int = 0

    @property
    def first_version(self) -> int:
        """The version of the weights that the group's first token was sampled with."""
        return min(int(completion.versions[0]) for completion in self.completions)


@runtime_checkable
class Rollout(Protocol):
    """Where groups come from: the same calls whether sampling happens in this process, in others or on a cluster.

    All methods are called from one thread of the trainer. Every one raises `RolloutError` (with the worker's traceback)
    once a worker has died, raised, or gone silent.
    """

    def start(self, params: Any, version: int, next_number: int, finished: Sequence[Group]) -> None:
        """Sample from group `next_number` on; `finished` are groups of a checkpoint that were done but not trained."""

    def take(self, count: int) -> list[Group]:
        """The next groups in the order of their numbers; waits for them."""

    def release(self, count: int) -> None:
        """`count` of the groups taken were dropped by a filter, so later groups move forward: admit as many more."""

    def skip(self, count: int, more: int) -> None:
        """The next `count` groups, the rest of an epoch that a callback ends, are not trained; the run has `more`
        groups at its end than was planned."""

    def publish(self, params: Any, version: int) -> None:
        """These are the parameters after `version` optimizer steps; sampling goes on with them."""

    def evaluate(self, prompts: Sequence[Prompt], num_generations: int) -> list[Group]:
        """Groups of other prompts, sampled with the parameters published last; in the order of `prompts`."""

    def finished(self) -> list[Group]:
        """Groups that are finished but not taken, for a checkpoint; they stay where they are."""

    def metrics(self) -> dict[str, float]:
        """Gauges since the last call: queue depth, waits, tokens sampled, seconds of weight loading, ..."""

    def close(self) -> None:
        """End all workers; never raises for a worker that is dead."""


class RolloutError(RuntimeError):
    """A rollout worker died, raised, or stopped answering."""
