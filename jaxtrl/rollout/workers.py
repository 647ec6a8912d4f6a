"""`LocalWorkers`: rollout workers as processes of this machine, seen from the trainer."""

import multiprocessing
import os
import pickle
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxtrl.rollout.group_queue import GroupQueue, queue_metrics
from jaxtrl.rollout.groups import Group, Prompt, RolloutError
from jaxtrl.rollout.pacing import Pacing, stripe
from jaxtrl.rollout.places import Place, inherited
from jaxtrl.rollout.producer import Finished, RolloutSetup, Task
from jaxtrl.rollout.scoring import check_picklable
from jaxtrl.rollout.weights import WeightsFolder, params_nbytes
from jaxtrl.rollout.worker import Announced, Beat, Failed, Loaded, Stop, run_worker

START_SECONDS = 300.0  # until the first heartbeat: imports, with a user's own
END_SECONDS = 5.0  # for a worker to end by itself


class Worker:
    """One worker process: its channel, and threads that send and receive so that the trainer never waits for it.

    `on_message(number, message)` is called in the receiving thread, with None when the worker has ended.
    """

    def __init__(self, number: int, payload: bytes, place: Place, beat_seconds: float, on_message: Callable):
        context = multiprocessing.get_context("spawn")
        self.number, self._on_message = number, on_message
        self._channel, theirs = context.Pipe()
        args = payload, theirs, number, os.getpid(), beat_seconds
        self.process = context.Process(target=run_worker, args=args, name=f"rollout-worker-{number}", daemon=True)
        with inherited(place):
            self.process.start()
        theirs.close()
        self.failure: str | None = None
        self.is_gone = False
        self.loaded = -1
        self.counters: dict[str, float] = {}
        self._silent, self._stuck, self._has_beaten, self._tick = 0.0, 0.0, False, beat_seconds / 2
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=work, name=f"{self.process.name}-{work.__name__}", daemon=True)
            for work in (self._send, self._receive)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, message: Any) -> None:
        self._outgoing.put(message)

    def check(self, stale_after: float) -> None:
        """Raises RolloutError where the worker is dead, has failed, or has been silent or stuck for too long."""
        if self.is_gone and self.failure is None:
            self.failure = self._describe_death()
        if self.failure is not None:
            raise RolloutError(self.failure)
        allowed = stale_after if self._has_beaten else max(stale_after, START_SECONDS)
        if self._silent > allowed or self._stuck > stale_after:
            is_silent = self._silent > allowed
            what = f"has been silent for {self._silent:.0f} s" if is_silent else f"is stuck for {self._stuck:.0f} s"
            raise RolloutError(
                f"rollout worker {self.number} (process {self.process.pid}) {what}, longer than "
                f"heartbeat_stale_after_s={stale_after:g}: see what it does (py-spy dump), or raise the limit"
            )

    def end(self, deadline: float) -> None:
        """Wait for the process until then; end it by force afterwards. Never raises."""
        self.process.join(max(0.0, deadline - time.monotonic()))
        for stop in (self.process.terminate, self.process.kill):
            if self.process.is_alive():
                stop()
                self.process.join(2)
        self._outgoing.put(None)
        for thread in self._threads:
            thread.join(timeout=2)
        with suppress(OSError):
            self._channel.close()

    def _send(self) -> None:
        with suppress(OSError):  # the worker is gone: the receiving thread says so
            while (message := self._outgoing.get()) is not None:
                self._channel.send(message)

    def _receive(self) -> None:
        message: Any = ()
        while message is not None:
            try:
                while not self._channel.poll(self._tick):
                    self._silent += self._tick  # not by the clock: trainer and worker may have been stopped together
                message = self._channel.recv()
            except (EOFError, OSError):
                message = None
            self._silent = 0.0
            if isinstance(message, Beat):
                self._stuck, self.counters, self._has_beaten = message.stuck, message.counters, True
            elif isinstance(message, Failed):
                self.failure = f"rollout worker {self.number} failed:\n{message.traceback}"
            elif isinstance(message, Loaded):
                self.loaded = message.version
            self.is_gone = message is None
            try:
                self._on_message(self.number, message)
            except Exception:  # a thread's own would be lost, and the trainer wait for ever
                self.failure = f"a message of rollout worker {self.number} is wrong:\n{traceback.format_exc()}"

    def _describe_death(self) -> str:
        self.process.join(2)
        code, hint = self.process.exitcode, ""
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            hint = " (the system's memory may have run out)" if code == -signal.SIGKILL else ""
        else:
            how = f"ended with exit status {code}"
            if not self._has_beaten:
                hint = " before it began (a script that trains needs `if __name__ == '__main__':` around its main part)"
        return f"rollout worker {self.number} (process {self.process.pid}) {how}{hint}: look for its last output above"


class LocalWorkers:
    """The `Rollout` of processes on this machine, one per place, each with its own devices and its stripe of groups.

    `weights_folder` and `weights_dtype` are those of `WeightsFolder`. Raises TypeError for a reward function that
    cannot be sent to a process. These must not start processes with `multiprocessing`: workers are its daemons.
    """

    def __init__(
        self,
        setup: RolloutSetup,
        pacing: Pacing,
        prompts: Sequence[Prompt],
        shuffle: bool = True,
        *,
        places: Sequence[Place] = (Place(),),
        weights_folder: Path | None = None,
        weights_dtype: str = "float32",
        heartbeat_stale_after_s: float = 300.0,
    ):
        check_picklable(setup.reward_funcs)
        self._payload = pickle.dumps(setup)
        self._queue = GroupQueue(pacing, prompts, setup.num_generations, setup.order_seed, shuffle)
        self._places, self._stale_after = places, heartbeat_stale_after_s
        self._weights_folder, self._weights_dtype = weights_folder, weights_dtype
        self._weights: WeightsFolder | None = None
        self._workers: list[Worker] = []
        self._evaluated: dict[int, Group] = {}
        self._news = threading.Condition()  # held to change anything that receiving threads change too
        self._wait_seconds = self._sync_seconds = 0.0
        self._last: dict[str, float] = {}

    def start(self, params: Any, version: int, next_number: int, finished: Sequence[Group]) -> None:
        if self._workers:
            raise RuntimeError("these workers are started already")
        self._queue.start(version, next_number, finished)
        nbytes = params_nbytes(params, self._weights_dtype)
        self._weights = WeightsFolder(nbytes, self._weights_folder, self._weights_dtype)
        beat = min(1.0, self._stale_after / 5)
        for number, place in enumerate(self._places):
            self._workers.append(Worker(number, self._payload, place, beat, self._on_message))
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
        if isinstance(message, Beat):
            return
        with self._news:
            if isinstance(message, Finished) and message.evaluation:
                self._evaluated[message.group.number] = message.group
            elif isinstance(message, Finished):
                self._queue.add(message.group)
            elif isinstance(message, Loaded) and self._weights is not None:
                self._weights.remove_before(min(worker.loaded for worker in self._workers))
            self._news.notify_all()
