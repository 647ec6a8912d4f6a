"""`rollout=ray`: the same producer in Ray actors, on this machine or over a cluster, behind the same interface.

Ray is imported when workers are made. Weights go through its object store; a lost actor is replaced, and its groups
that were not finished are sampled again.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

from jaxtrl.rollout.groups import Prompt, RolloutError
from jaxtrl.rollout.pacing import Pacing
from jaxtrl.rollout.pool import OnMessage, WorkerPool
from jaxtrl.rollout.producer import Finished, GroupProducer, RolloutSetup, Task
from jaxtrl.rollout.worker import Announced, Loaded, Stop

WORK_SECONDS = 0.5  # of one call: new weights and tasks come between calls
WAIT_SECONDS = 0.05  # for scores inside a call
MAX_LOSSES = 3  # of actors in a row that finish nothing


class Work(NamedTuple):
    """What an actor did in one call: groups, the version of its weights, and counters that only grow."""

    finished: list[Finished]
    version: int
    counters: dict[str, float]


class RolloutActor:
    """What runs in the cluster. `work` and `is_compiling` may be called side by side."""

    def __init__(self, setup: RolloutSetup, number: int):
        from jaxtrl.hardware.compile_cache import enable_compile_cache

        enable_compile_cache(setup.compile_cache)
        self._setup, self._number = setup, number
        self._producer: GroupProducer | None = None

    def work(self, tasks: list[Task], version: int, params: Any) -> Work:
        """Take the tasks and, where given, the weights; then sample for a moment, less where nothing is left."""
        if self._producer is None:
            self._producer = GroupProducer(self._setup, params, version, self._number)
        elif params is not None:
            self._producer.update_params(params, version)
        finished: list[Finished] = []
        producer, start = self._producer, time.perf_counter()
        for task in tasks:
            producer.put(task)
        while not producer.idle and not finished and time.perf_counter() - start < WORK_SECONDS:
            finished += producer.advance(WAIT_SECONDS)
        return Work(finished, producer.sampler.version, dict(producer.counters))

    def is_compiling(self) -> bool:
        """Whether it is no wonder that `work` takes long."""
        return self._producer is None or self._producer.sampler.engine.programs.compiling

    def process_id(self) -> int:
        """Of the actor, on its machine."""
        return os.getpid()


class ObjectStore:
    """Published weights in Ray's object store; an old version goes when nobody refers to it any more."""

    def __init__(self, ray: Any):
        self._put = ray.put

    def write(self, params: Any, version: int) -> Any:
        return self._put(jax.device_get(params))

    def remove_before(self, version: int) -> None:
        """Actors copy what they load, and the trainer keeps the newest only."""

    def close(self) -> None:
        pass


class RayWorker:
    """One actor after another, and a thread of the trainer that calls it.

    `on_message(number, message)` is called in that thread, as a local worker's, with None when it has ended.
    """

    def __init__(self, number: int, ray: Any, make_actor: Callable[[int], Any], on_message: Callable):
        self.number, self.loaded, self.counters = number, -1, dict[str, float]()
        self.lost = 0  # actors that were replaced
        self.actor = make_actor(number)
        self._ray, self._make_actor, self._on_message = ray, make_actor, on_message
        self._failure: str | None = None
        self._past: dict[str, float] = {}  # counters of actors that are gone
        self._losses = 0  # in a row
        self._called = time.monotonic()  # since when the actor has not answered; 0: it has nothing to do
        self._newest: Announced | None = None
        self._new: list[Task] = []
        self._given: dict[tuple[bool, int], Task] = {}  # not finished
        self._stopped = False
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._drive, name=f"ray-worker-{number}", daemon=True)
        self._thread.start()

    def send(self, message: Any) -> None:
        with self._news:
            if isinstance(message, Announced):
                self._newest = message
            elif isinstance(message, Stop):
                self._stopped = True
            else:
                self._new.append(message)
            self._news.notify_all()

    def check(self, stale_after: float) -> None:
        """Raises RolloutError where the actor's code has raised, actors die again and again, or one does not answer."""
        called = self._called
        if self._failure is None and called and time.monotonic() - called > stale_after and not self._is_compiling():
            self._failure = (
                f"the Ray actor of rollout worker {self.number} has not answered for longer than "
                f"heartbeat_stale_after_s={stale_after:g}: see what it does (ray stack), or raise the limit"
            )
        if self._failure is not None:
            raise RolloutError(self._failure)

    def end(self, deadline: float) -> None:
        """End actor and thread; never raises."""
        self._stopped = True
        self._ray.kill(self.actor)
        with self._news:
            self._news.notify_all()
        self._thread.join(max(0.0, deadline - time.monotonic()) + 2)

    def _is_compiling(self) -> bool:
        try:
            return self._ray.get(self.actor.is_compiling.remote(), timeout=5)
        except self._ray.exceptions.RayError:
            return False

    def _drive(self) -> None:
        try:
            while self._wait_for_work():
                tasks, weights = self._take_work()
                self._called = time.monotonic()
                try:
                    work = self._ray.get(self.actor.work.remote(tasks, *weights))
                except self._ray.exceptions.RayActorError as error:
                    if self._stopped:
                        return
                    self._replace(error)
                else:
                    self._take(work)
        except Exception as error:
            if not self._stopped:
                self._failure = f"rollout worker {self.number} failed:\n{error}"
        finally:
            self._called = 0.0
            self._on_message(self.number, None)

    def _wait_for_work(self) -> bool:
        """True once there is something to do, False when it is the end."""
        with self._news:
            self._called = 0.0
            self._news.wait_for(lambda: self._stopped or (self._newest and (self._new or self._given)))
            return not self._stopped

    def _take_work(self) -> tuple[list[Task], tuple[int, Any]]:
        with self._news:
            tasks, self._new = self._new, []
            self._given |= {(task.evaluation, task.number): task for task in tasks}
            assert self._newest is not None
            version, weights = self._newest
            return tasks, (version, None if version == self.loaded else weights)

    def _take(self, work: Work) -> None:
        if work.version != self.loaded:
            self.loaded = work.version
            self._on_message(self.number, Loaded(work.version))
        self.counters = {name: value + self._past.get(name, 0.0) for name, value in work.counters.items()}
        for finished in work.finished:
            self._losses = 0
            del self._given[finished.evaluation, finished.group.number]
            self._on_message(self.number, finished)

    def _replace(self, error: Exception) -> None:
        """A new actor for what the lost one has not finished."""
        self._losses, self.lost = self._losses + 1, self.lost + 1
        if self._losses >= MAX_LOSSES:
            raise RuntimeError(f"{self._losses} actors in a row were lost before they finished a group: {error}")
        print(f"rollout worker {self.number}: its Ray actor is lost and replaced ({str(error).splitlines()[0]})")
        self._past, self.loaded = self.counters, -1
        with self._news:
            self._new, self._given = [*self._given.values(), *self._new], {}
        self.actor = self._make_actor(self.number)


def connect(address: str | None) -> Any:
    """The module `ray`, connected to a cluster: `address`, else RAY_ADDRESS, else one that starts on this machine.

    Raises ValueError where Ray is not installed or the cluster is not there.
    """
    try:
        import ray
    except ImportError:
        raise ValueError("rollout=ray needs Ray: pip install 'jaxtrl[ray]', or use rollout=workers") from None
    if not ray.is_initialized():
        try:
            ray.init(address=address, include_dashboard=False)
        except ConnectionError as error:
            raise ValueError(
                f"there is no Ray cluster at {address or os.environ.get('RAY_ADDRESS')}: {error}"
            ) from None
    return ray


class RayWorkers(WorkerPool):
    """The `Rollout` of `workers` Ray actors, each with its stripe of groups.

    `address` is that of the cluster (None: RAY_ADDRESS, else one on this machine); actors there need jaxtrl installed.
    `resources` of an actor are as `ray.remote` takes them; None: one core or device of this process's platform.
    `lost_actors` counts those that were replaced. Raises ValueError where Ray is not installed or not reached.
    """

    def __init__(
        self,
        setup: RolloutSetup,
        pacing: Pacing,
        prompts: Sequence[Prompt],
        shuffle: bool = True,
        *,
        workers: int = 1,
        address: str | None = None,
        resources: Mapping[str, Any] | None = None,
        heartbeat_stale_after_s: float = 300.0,
    ):
        super().__init__(setup, pacing, prompts, shuffle, heartbeat_stale_after_s)
        self._ray = connect(address)
        platform = jax.default_backend()
        chosen = dict(_RESOURCES.get(platform, {"num_gpus": 1}) if resources is None else resources)
        variables = {"JAX_PLATFORMS": "cpu"} if platform == "cpu" else {}
        # Two calls at a time: `is_compiling` is answered while `work` goes on.
        actor = self._ray.remote(max_concurrency=2, runtime_env={"env_vars": variables}, **chosen)(RolloutActor)
        stored = self._ray.put(setup)
        self._make_actor = lambda number: actor.remote(stored, number)
        self._count = workers

    @property
    def lost_actors(self) -> int:
        return sum(worker.lost for worker in self._workers if isinstance(worker, RayWorker))

    def metrics(self) -> dict[str, float]:
        return {**super().metrics(), "rollout/lost_actors": float(self.lost_actors)}

    def _open(self, params: Any) -> tuple[ObjectStore, Sequence[Callable[[OnMessage], RayWorker]]]:
        makers = [partial(RayWorker, number, self._ray, self._make_actor) for number in range(self._count)]
        return ObjectStore(self._ray), makers


_RESOURCES: dict[str, dict[str, Any]] = {
    "cpu": {"num_cpus": 1},
    "neuron": {"num_cpus": 1, "resources": {"neuron_cores": 1}},
}
