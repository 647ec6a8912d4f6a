"""The rollout worker's process: messages in and out, its heartbeat, and its end when the trainer ends.

This module imports nothing heavy: what is sent to the process is unpickled, and JAX imported, when `run_worker` reports
errors already.
"""

import ctypes
import os
import pickle
import queue
import shutil
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from jaxtrl.rollout.producer import GroupProducer, RolloutSetup

IDLE_SECONDS = 0.02  # between looks for messages while rewards are computed
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class Announced(NamedTuple):
    """To the worker: weights of this version are in this file (of Ray's object store: are this object)."""

    version: int
    place: Any


class Stop(NamedTuple):
    """To the worker: end."""


class Beat(NamedTuple):
    """From the worker: it is alive. `stuck` seconds it has been in one call that is no compile; counters only grow."""

    stuck: float
    counters: dict[str, float]


class Loaded(NamedTuple):
    """From the worker: it samples with this version now."""

    version: int


class Failed(NamedTuple):
    """From the worker: it ends with this exception."""

    traceback: str


def run_worker(payload: bytes, channel: Connection, number: int, parent: int, beat_seconds: float) -> None:
    """What the process runs: `payload` is a pickled RolloutSetup, `parent` the process id of the trainer.

    Ends with status 0 when it is told to, and at once, removing the announced weights, when the trainer is gone.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which ends its workers
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked while the process started
    _wake_when_parent_dies()
    status = _Status(number)
    inbox = _Inbox(channel, parent)
    outbox = _Outbox(channel, status, beat_seconds)
    try:
        _work(pickle.loads(payload), number, inbox, outbox, status)
    except BaseException:
        outbox.put(Failed(traceback.format_exc()))
        outbox.flush()
        sys.exit(1)
    outbox.flush()


def _work(setup: "RolloutSetup", number: int, inbox: "_Inbox", outbox: "_Outbox", status: "_Status") -> None:
    """Load the newest weights, take tasks, sample; until told to stop."""
    from jaxtrl.hardware.memory import keep_freed_memory

    if os.environ.get("JAX_PLATFORMS") == "cpu":
        keep_freed_memory()  # before JAX makes its first array
    from jaxtrl.hardware.compile_cache import enable_compile_cache
    from jaxtrl.rollout.producer import GroupProducer, Task
    from jaxtrl.rollout.weights import read_weights

    enable_compile_cache(setup.compile_cache)
    while True:
        producer = status.producer
        announced = None
        for message in inbox.read(wait=producer is None or producer.idle, status=status):
            if isinstance(message, Stop):
                return
            if isinstance(message, Announced):
                announced = message
            elif isinstance(message, Task):
                status.waiting.append(message)
        if announced is not None:
            start = time.perf_counter()
            params = read_weights(announced.place)
            if producer is None:
                producer = status.producer = GroupProducer(setup, params, announced.version, number)
            else:
                producer.update_params(params, announced.version)
            producer.counters["load_seconds"] += time.perf_counter() - start
            outbox.put(Loaded(announced.version))
        if producer is not None:
            while status.waiting:
                producer.put(status.waiting.pop(0))
            finished = producer.advance(IDLE_SECONDS)
            for one in [Beat(0.0, status.counters()), *finished] if finished else ():
                outbox.put(one)


class _Status:
    """What the heartbeat tells: the loop sets it, the sending thread reads it."""

    def __init__(self, number: int):
        self.number = number
        self.producer: GroupProducer | None = None
        self.waiting: list[Any] = []
        self.rounds = 0  # of the loop
        self.is_waiting = False  # for messages
        self._stuck, self._rounds = 0.0, 0

    def beat(self, seconds: float | int) -> Beat:
        """`seconds` after the last one. Adding these up leaves out the time for which the whole process was stopped."""
        producer = self.producer
        compiling = producer is None or producer.sampler.engine.programs.compiling
        goes_on = self.is_waiting or compiling or self.rounds != self._rounds
        self._stuck, self._rounds = 0.0 if goes_on else self._stuck + seconds, self.rounds
        return Beat(self._stuck, self.counters())

    def counters(self) -> dict[str, float]:
        return {} if self.producer is None else dict(self.producer.counters)


class _Inbox:
    """Messages of the trainer, received in a thread, so that the trainer's end is noticed whatever the loop does."""

    def __init__(self, channel: Connection, parent: int):
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._channel, self._parent = channel, parent
        self._weights: Path | None = None
        threading.Thread(target=self._receive, name="receive", daemon=True).start()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def read(self, wait: bool, status: _Status) -> list[Any]:
        """All messages there are; with `wait`, at least one."""
        out = []
        status.is_waiting = wait
        if wait:
            out.append(self._messages.get())
        status.rounds, status.is_waiting = status.rounds + 1, False
        with suppress(queue.Empty):
            while True:
                out.append(self._messages.get_nowait())
        return out

    def _receive(self) -> None:
        try:
            while True:
                message = self._channel.recv()
                if isinstance(message, Announced):
                    self._weights = message.place
                self._messages.put(message)
        except (EOFError, OSError):
            self._end()

    def _watch(self) -> None:
        """The channel stays open where a child of the trainer has it too: look for the trainer itself."""
        while os.getppid() == self._parent:
            time.sleep(0.5)
        self._end()

    def _end(self) -> None:
        """The trainer is gone, and cannot tidy up."""
        if self._weights is not None:
            shutil.rmtree(self._weights.parents[1], ignore_errors=True)
        os._exit(1)


class _Outbox:
    """Messages to the trainer, sent by a thread, which beats in between: a slow trainer never holds up sampling."""

    def __init__(self, channel: Connection, status: _Status, beat_seconds: float):
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._channel, self._status, self._seconds = channel, status, beat_seconds
        self._thread = threading.Thread(target=self._send, name="send", daemon=True)
        self._thread.start()

    def put(self, message: Any) -> None:
        self._messages.put(message)

    def flush(self) -> None:
        """Send what is there and end the thread."""
        self._messages.put(None)
        self._thread.join(timeout=5)

    def _send(self) -> None:
        sent = 0.0
        with suppress(OSError):  # the trainer is gone: the receiving thread knows
            while True:
                now = time.monotonic()
                if now - sent >= self._seconds:
                    self._channel.send(self._status.beat(self._seconds))
                    sent = now
                with suppress(queue.Empty):
                    message = self._messages.get(timeout=self._seconds)
                    if message is None:
                        return
                    self._channel.send(message)


def _wake_when_parent_dies() -> None:
    """On Linux a stopped worker (SIGSTOP) continues when the trainer dies, and then sees that it is gone."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
