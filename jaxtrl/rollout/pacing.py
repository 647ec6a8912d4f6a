"""Which groups may be sampled when: versions, staleness, stripes, prompt order and seeds (DESIGN.md section 10).

A *batch* is the `groups_per_step` groups that are trained together, for `num_iterations` optimizer steps in a row. With
one iteration, the default, batch s is optimizer step s. A *version* is a number of optimizer steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

import numpy as np

from jaxtrl.rows.order import epoch_order


@dataclass(frozen=True)
class Pacing:
    """How far sampling may be ahead of training.

    Group g, of which d earlier ones were dropped by a filter, belongs to batch `(g - d) // groups_per_step`. It may be
    sampled once the last step of that batch is at most `max_staleness` after the published version, and while the
    groups that are admitted and not yet taken are at most `queue_groups` (None: no other bound). There are
    `total_groups` groups: none is admitted beyond them.

    The trainer publishes after every optimizer step whose number is a multiple of `weight_sync_steps`. Raises
    ValueError where it would then wait for ever: for groups that are only admitted with newer weights, or that the
    queue has no room for.
    """

    groups_per_step: int
    total_groups: int
    max_staleness: int = 4
    num_iterations: int = 1
    weight_sync_steps: int = 1
    queue_groups: int | None = None

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}: it must be a whole number from {least} on")
        iterations, sync = self.num_iterations, self.weight_sync_steps
        needed = iterations - 1 + sync - gcd(iterations, sync)  # of the batch whose start is furthest from a sync
        if self.max_staleness < needed:
            raise ValueError(
                f"max_staleness is {self.max_staleness}, but with weight_sync_steps {sync} and num_iterations "
                f"{iterations} groups are up to {needed} steps old when they are trained: raise max_staleness to "
                f"{needed}, or sync more often"
            )
        if self.queue_groups is not None and self.queue_groups < self.groups_per_step:
            raise ValueError(
                f"the queue holds {self.queue_groups} groups, but a step takes {self.groups_per_step}: raise "
                "queue_maxsize, which counts completions"
            )

    def limit(self, version: int, dropped: int = 0, taken: int | None = None) -> int:
        """How many groups are admitted, counted from group 0, when these weights are published.

        `dropped` of the groups so far were dropped by a filter; `taken` (None: the queue does not matter) is how many
        the trainer has taken, those dropped included.
        """
        batches = (version + self.max_staleness + 1) // self.num_iterations
        limit = min(max(batches, 0) * self.groups_per_step + dropped, self.total_groups)
        if self.queue_groups is not None and taken is not None:
            limit = min(limit, taken + self.queue_groups)
        return limit

    def trained_before(self, version: int) -> int:
        """Groups, those dropped not counted, that are trained when the trainer has made `version` optimizer steps."""
        return version // self.num_iterations * self.groups_per_step


_LEAST = {"groups_per_step": 1, "total_groups": 0, "max_staleness": 0, "num_iterations": 1, "weight_sync_steps": 1}


class StalenessCounter:
    """Counts how old groups are when they are trained. Raises AssertionError above the bound: pacing has a defect."""

    def __init__(self, max_staleness: int):
        self.max_staleness = max_staleness
        self.groups, self.total, self.max = 0, 0, 0

    def add(self, first_version: int, step: int) -> int:
        """Staleness of a group whose first token has this version, trained in optimizer step `step` (from 0)."""
        staleness = step - first_version
        if not 0 <= staleness <= self.max_staleness:
            raise AssertionError(
                f"a group of version {first_version} is trained at step {step}, but max_staleness is "
                f"{self.max_staleness}: this is a defect of jaxtrl, please report it"
            )
        self.groups += 1
        self.total += staleness
        self.max = max(self.max, staleness)
        return staleness


def stripe(number: int, workers: int) -> int:
    """The worker that samples this group."""
    return number % workers


def prompt_index(number: int, seed: int, count: int, shuffle: bool = True) -> int:
    """Which of `count` prompts group `number` is of: each epoch goes through all of them once, in its own order."""
    epoch, place = divmod(number, count)
    return int(epoch_order(seed, epoch, count, shuffle)[place])


def prompt_indices(start: int, seed: int, count: int, shuffle: bool = True) -> Iterator[int]:
    """`prompt_index` of the groups from `start` on, without end."""
    epoch, place = divmod(start, count)
    while True:
        yield from (int(index) for index in epoch_order(seed, epoch, count, shuffle)[place:])
        epoch, place = epoch + 1, 0


def group_seed(seed: int, number: int, evaluation: bool = False) -> int:
    """The seed of a group's completions: of (run seed, group) only, so that a group is the same beside any others.

    Completions of a group differ by their generation index, which is part of the key of their random numbers
    (`jaxtrl.rollout.requests`). Evaluation has numbers and seeds of its own. From NumPy's SeedSequence, whose output
    NumPy keeps the same in all versions.
    """
    return int(np.random.SeedSequence([seed % 2**64, number, int(evaluation)]).generate_state(1, np.uint64)[0])
