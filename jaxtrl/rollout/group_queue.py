"""The trainer's side of pacing: which groups are admitted, which are finished, and in which order they are taken."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxtrl.rollout.groups import Group, Prompt
from jaxtrl.rollout.pacing import Pacing, prompt_indices
from jaxtrl.rollout.producer import Task


class GroupQueue:
    """Groups of a run by number, from admission until they are taken. Holds no lock and starts nothing.

    Group g is of `prompts[prompt_index(g, seed, len(prompts), shuffle)]`. `finished_total`, `taken_total` and
    `skipped_total` count all groups since the start, so that finished = taken + kept + skipped proves that none was
    thrown away but those that the trainer asked to.
    """

    def __init__(
        self, pacing: Pacing, prompts: Sequence[Prompt], num_generations: int, seed: int, shuffle: bool = True
    ):
        if pacing.total_groups and not len(prompts):
            raise ValueError("there are no prompts to sample from: check the data set and the counts of dropped rows")
        self.pacing, self.prompts, self.num_generations = pacing, prompts, num_generations
        self.seed, self.shuffle = seed, shuffle
        self.start(0, 0, ())

    def start(self, version: int, next_number: int, finished: Sequence[Group]) -> None:
        """Group `next_number` is taken next, by a trainer that has made `version` optimizer steps."""
        self.version, self.next = version, next_number
        self.dropped = max(0, next_number - self.pacing.trained_before(version))
        self.kept: dict[int, Group] = {}
        for group in finished:
            if group.number < next_number:
                raise ValueError(f"group {group.number} was trained already: the next one is {next_number}")
            self.kept[group.number] = group
        self.finished_total, self.taken_total, self.skipped_total, self.queue_seconds = len(self.kept), 0, 0, 0.0
        self._unwanted: set[int] = set()  # skipped while they were under way
        self._admitted = next_number
        self._indices = prompt_indices(next_number, self.seed, len(self.prompts), self.shuffle)

    @property
    def limit(self) -> int:
        """How many groups may be admitted now, counted from group 0."""
        return self.pacing.limit(self.version, self.dropped, self.next)

    def admit(self) -> list[Task]:
        """What may be sampled now and was not before."""
        tasks = []
        while self._admitted < self.limit:
            number, index = self._admitted, next(self._indices)
            self._admitted += 1
            if number not in self.kept:
                tasks.append(Task(number, self.prompts[index], self.num_generations))
        return tasks

    def add(self, group: Group) -> None:
        """A group is finished."""
        if group.number in self._unwanted:
            self._unwanted.remove(group.number)
            self.finished_total += 1
            self.skipped_total += 1
            return
        if group.number in self.kept or not self.next <= group.number < self._admitted:
            raise AssertionError(f"group {group.number} came twice or was not asked for: this is a defect of jaxtrl")
        self.kept[group.number] = group
        self.finished_total += 1

    def count(self, wanted: int) -> int:
        """How many of `wanted` groups there are up to the end of the run. Raises RuntimeError if they cannot come."""
        count = min(wanted, self.pacing.total_groups - self.next)
        if self.next + count > self.limit:
            raise RuntimeError(
                f"{count} groups are asked for, but only {self.limit - self.next} are admitted with weights of version "
                f"{self.version}: publish newer weights first"
            )
        return count

    def is_ready(self, count: int) -> bool:
        return all(number in self.kept for number in range(self.next, self.next + count))

    def take(self, count: int) -> list[Group]:
        """The next groups, which must be ready."""
        taken = [self.kept.pop(number) for number in range(self.next, self.next + count)]
        self.next += count
        self.taken_total += count
        self.queue_seconds += sum(time.time() - group.scored for group in taken)
        return taken

    def skip(self, count: int, more: int = 0) -> None:
        """The next `count` groups are not trained: those that are done, or under way, are dropped, others not begun.

        The run has `more` groups at its end than was planned.
        """
        end = self.next + count
        for number in range(self.next, min(end, self._admitted)):
            if self.kept.pop(number, None) is None:
                self._unwanted.add(number)
            else:
                self.skipped_total += 1
        for _ in range(self._admitted, end):
            next(self._indices)
        self._admitted, self.next = max(self._admitted, end), end
        self.dropped += count
        self.pacing = replace(self.pacing, total_groups=self.pacing.total_groups + more)

    def finished(self) -> list[Group]:
        return [self.kept[number] for number in sorted(self.kept)]


def queue_metrics(queue: GroupQueue, since: Mapping[str, float | int]) -> dict[str, float]:
    """Gauges from what has been counted since the last time; seconds are sums, but for the mean time in the queue."""
    gauges = {
        "rollout/queue_depth": len(queue.kept),
        "rollout/queue_seconds": since.get("queue_seconds", 0.0) / max(since.get("taken", 0.0), 1.0),
        "rollout/wait_seconds": since.get("wait_seconds", 0.0),
        "rollout/weight_sync_seconds": since.get("sync_seconds", 0.0) + since.get("load_seconds", 0.0),
        "rollout/decode_seconds": since.get("decode_seconds", 0.0),
        "rollout/score_seconds": since.get("score_seconds", 0.0),
        "rollout/sampled_tokens": since.get("tokens", 0.0),
        "rollout/failed_completions": since.get("failed", 0.0),
        "rollout/finished_groups": queue.finished_total,
        "rollout/taken_groups": queue.taken_total,
        "rollout/skipped_groups": queue.skipped_total,
        "rollout/admission_limit": queue.limit,
    }
    return {name: float(value) for name, value in gauges.items()}
