"""`rollout=inline`: sampling in the trainer's process, alternating with training, for one device."""

import time
from collections.abc import Sequence
from typing import Any

import jax

from jaxtrl.model.sharding import is_shared, on_host
from jaxtrl.rollout.group_queue import GroupQueue, queue_metrics
from jaxtrl.rollout.groups import Group, Prompt
from jaxtrl.rollout.pacing import Pacing
from jaxtrl.rollout.producer import GroupProducer, RolloutSetup, Task

WAIT_SECONDS = 0.5  # for scores, before looking again


class InlineRollout:
    """The `Rollout` that samples when groups are taken, all that are admitted, and until nothing is under way.

    So a group depends on nothing but the weights it was admitted with, and a resumed run samples the same bits.
    Parameters that lie on several devices are copied to the first.
    """

    def __init__(self, setup: RolloutSetup, pacing: Pacing, prompts: Sequence[Prompt], shuffle: bool = True):
        self.setup = setup
        self._queue = GroupQueue(pacing, prompts, setup.num_generations, setup.order_seed, shuffle)
        self._producer: GroupProducer | None = None
        self._evaluated: list[Group] = []
        self._wait_seconds = self._load_seconds = 0.0
        self._last: dict[str, float] = {}

    def start(self, params: Any, version: int, next_number: int, finished: Sequence[Group]) -> None:
        self._queue.start(version, next_number, finished)
        if self._producer is None:
            self._producer = GroupProducer(self.setup, _on_one_device(params), version)
        else:
            self._producer.update_params(_on_one_device(params), version)

    def take(self, count: int) -> list[Group]:
        start = time.perf_counter()
        count = self._queue.count(count)
        self._run(self._queue.admit())
        self._wait_seconds += time.perf_counter() - start
        return self._queue.take(count)

    def release(self, count: int) -> None:
        self._queue.dropped += count

    def skip(self, count: int, more: int) -> None:
        self._queue.skip(count, more)

    def publish(self, params: Any, version: int) -> None:
        start = time.perf_counter()
        self.producer.update_params(_on_one_device(params), version)
        self._queue.version = version
        self._load_seconds += time.perf_counter() - start

    def evaluate(self, prompts: Sequence[Prompt], num_generations: int) -> list[Group]:
        self._evaluated = []
        self._run([Task(i, prompt, num_generations, True) for i, prompt in enumerate(prompts)])
        return sorted(self._evaluated, key=lambda group: group.number)

    def finished(self) -> list[Group]:
        return self._queue.finished()

    def metrics(self) -> dict[str, float]:
        now = {**self.producer.counters, "queue_seconds": self._queue.queue_seconds, "taken": self._queue.taken_total}
        now |= {"wait_seconds": self._wait_seconds, "load_seconds": self._load_seconds}
        gone, self._last = self._last, now
        return queue_metrics(self._queue, {name: value - gone.get(name, 0) for name, value in now.items()})

    def close(self) -> None:
        if self._producer is not None:
            self._producer.close()
            self._producer = None

    @property
    def producer(self) -> GroupProducer:
        if self._producer is None:
            raise RuntimeError("this rollout is not started, or closed")
        return self._producer

    def _run(self, tasks: list[Task]) -> None:
        for task in tasks:
            self.producer.put(task)
        while not self.producer.idle:
            for evaluation, group in self.producer.advance(WAIT_SECONDS):
                if evaluation:
                    self._evaluated.append(group)
                else:
                    self._queue.add(group)


def _on_one_device(params: Any) -> Any:
    if is_shared(params):
        return jax.tree.map(on_host, params)
    devices = {device for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array) for device in leaf.devices()}
    return jax.device_get(params) if len(devices) > 1 else params
