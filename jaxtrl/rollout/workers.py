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
from functools import partial
from pathlib import Path
from typing import Any

from jaxtrl.rollout.groups import Prompt, RolloutError
from jaxtrl.rollout.pacing import Pacing
from jaxtrl.rollout.places import Place, inherited
from jaxtrl.rollout.pool import OnMessage, WorkerPool
from jaxtrl.rollout.producer import RolloutSetup
from jaxtrl.rollout.scoring import check_picklable
from jaxtrl.rollout.weights import WeightsFolder, params_nbytes
from jaxtrl.rollout.worker import Beat, Failed, Loaded, run_worker

START_SECONDS = 300.0  # until the first heartbeat: imports, with a user's own


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
                continue
            if isinstance(message, Failed):
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


class LocalWorkers(WorkerPool):
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
        super().__init__(setup, pacing, prompts, shuffle, heartbeat_stale_after_s)
        check_picklable(setup.reward_funcs)
        self._payload = pickle.dumps(setup)
        self._places = places
        self._weights_folder, self._weights_dtype = weights_folder, weights_dtype

    def _open(self, params: Any) -> tuple[WeightsFolder, Sequence[Callable[[OnMessage], Worker]]]:
        weights = WeightsFolder(params_nbytes(params, self._weights_dtype), self._weights_folder, self._weights_dtype)
        beat = min(1.0, self._stale_after / 5)
        return weights, [partial(Worker, n, self._payload, place, beat) for n, place in enumerate(self._places)]
