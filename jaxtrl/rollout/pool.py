"""`WorkerPool`: a `Rollout` of workers that run beside the trainer, wherever they do."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxtrl.rollout.group_queue import GroupQueue, queue_metrics
from jaxtrl.rollout.groups import Group, Prompt, RolloutError
from jaxtrl.rollout.pacing import Pacing, stripe
from jaxtrl.rollout.producer import Finished, RolloutSetup, Task
from jaxtrl.rollout.worker import Announced, Loaded, Stop

END_SECONDS = 5.0  # for a worker to end by itself
OnMessage = Callable[[int, Any], None]


@runtime_checkable  # for checks in tests
class WorkerHandle(Protocol):
    """What the trainer has of a worker. `loaded` is the version it samples with, `counters` only grow.

    It gives `Finished` and `Loaded` to the pool's `on_message(number, message)` from a thread of its own, any other
    message to wake a trainer that waits, and None when the worker has ended.
    """

    number: int
    loaded: int
    counters: dict[str, float]

    def send(self, message: Any) -> None:
        """A `Task`, `Announced` or `Stop`; returns at once."""

    def check(self, stale_after: float) -> None:
        """Raises RolloutError where the worker is dead, has failed, or has not answered for so many seconds."""

    def end(self, deadline: float) -> None:
        """Wait until then (by `time.monotonic`) for its end, then force it; never raises."""


@runtime_checkable
class WeightStore(Protocol):
    """Where versions of the weights are published."""

    def write(self, params: Any, version: int) -> Any:
        """What workers are told to load."""

    def remove_before(self, version: int) -> None:
        """No worker will ask for older ones."""

    def close(self) -> None: ...


class WorkerPool(ABC):
    """Gives each worker its stripe of the groups, and puts what comes back in order."""

    def __init__(
        self,
        setup: RolloutSetup,
        pacing: Pacing,
        prompts: Sequence[Prompt],
        shuffle: bool,
        heartbeat_stale_after_s: float,
    ):
        self._queue = GroupQueue(pacing, prompts, setup.num_generations, setup.order_seed, shuffle)
        self._stale_after = heartbeat_stale_after_s
        self._weights: WeightStore | None = None
        self._workers: list[WorkerHandle] = []
        self._evaluated: dict[int, Group] = {}
        self._news = threading.Condition()  # held to change anything that receiving threads change too
        self._wait_seconds = self._sync_seconds = 0.0
        self._last: dict[str, float] = {}

    @abstractmethod
    def _open(self, params: Any) -> tuple[WeightStore, Sequence[Callable[[OnMessage], WorkerHandle]]]:
        """The store for weights like these, and what starts each worker."""

    def start(self, params: Any, version: int, next_number: int, finished: Sequence[Group]) -> None:
        if self._workers:
            raise RuntimeError("these workers are started already")
        self._queue.start(version, next_number, finished)
        self._weights, makers = self._open(params)
        for make in makers:
            self._workers.append(make(self._on_message))
        self.publish(params, version)

    def take(self, count: int) -> list[Group]:
        count = self._queue.count(count)
        self._admit()
        start = time.perf_counter()
        self._wait(lambda: self._queue.is_ready(count))
        self._wait_seconds += time.perf_counter() - start
        with self._news:
            taken = self._queue.take(count)
        self._admit()
        return taken

    def release(self, count: int) -> None:
        self._queue.dropped += count
        self._admit()

    def skip(self, count: int, more: int) -> None:
        with self._news:
            self._queue.skip(count, more)
        self._admit()

    def publish(self, params: Any, version: int) -> None:
        self._check()
        start = time.perf_counter()
        assert self._weights is not None
        path = self._weights.write(params, version)
        self._queue.version = version
        for worker in self._workers:
            worker.send(Announced(version, path))
        self._sync_seconds += time.perf_counter() - start
        self._admit()

    def evaluate(self, prompts: Sequence[Prompt], num_generations: int) -> list[Group]:
        self._evaluated.clear()
        for number, prompt in enumerate(prompts):
            self._workers[stripe(number, len(self._workers))].send(Task(number, prompt, num_generations, True))
        self._wait(lambda: len(self._evaluated) == len(prompts))
        return [self._evaluated[number] for number in range(len(prompts))]

    def finished(self) -> list[Group]:
        with self._news:
            return self._queue.finished()

    def metrics(self) -> dict[str, float]:
        with self._news:
            now: dict[str, float] = {"queue_seconds": self._queue.queue_seconds, "taken": self._queue.taken_total}
            now |= {"wait_seconds": self._wait_seconds, "sync_seconds": self._sync_seconds}
            for worker in self._workers:
                for name, value in worker.counters.items():
                    now[name] = now.get(name, 0) + value
            gone, self._last = self._last, now
            return queue_metrics(self._queue, {name: value - gone.get(name, 0) for name, value in now.items()})

    def close(self) -> None:
        for worker in self._workers:
            worker.send(Stop())
        deadline = time.monotonic() + END_SECONDS
        for worker in self._workers:
            try:
                worker.check(self._stale_after)
                worker.end(deadline)
            except RolloutError:  # it will not listen
                worker.end(0.0)
        self._workers = []
        if self._weights is not None:
            self._weights.close()

    def _admit(self) -> None:
        with self._news:
            tasks = self._queue.admit()
        for task in tasks:
            self._workers[stripe(task.number, len(self._workers))].send(task)

    def _check(self) -> None:
        if not self._workers:
            raise RuntimeError("these workers are not started, or closed")
        for worker in self._workers:
            worker.check(self._stale_after)

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        with self._news:
            while not is_ready():
                self._check()
                self._news.wait(timeout=0.5)

    def _on_message(self, number: int, message: Any) -> None:
        """In a worker's receiving thread; None: it has ended."""
        with self._news:
            if isinstance(message, Finished) and message.evaluation:
                self._evaluated[message.group.number] = message.group
            elif isinstance(message, Finished):
                self._queue.add(message.group)
            elif isinstance(message, Loaded) and self._weights is not None:
                self._weights.remove_before(min(worker.loaded for worker in self._workers))
            self._news.notify_all()
