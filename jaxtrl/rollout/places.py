"""Where rollout workers run: environment and CPU cores of their processes, set before these start."""

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

_VARIABLES = {"gpu": "CUDA_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}


class Place(NamedTuple):
    """Environment variables of a worker, and the CPU cores it is held to (None: all)."""

    environment: Mapping[str, str] = {}
    cpus: frozenset[int] | None = None


def worker_places(platform: str, workers: int, cores: str | None = None) -> list[Place]:
    """A place per worker on a JAX platform ("cpu", "gpu", "cuda"); `hardware.environment.worker_environments` has those
    on Neuron.

    `cores` are what the workers share evenly and the trainer does not use: CPU cores or GPU indices, like "1-3" or
    "0,2". Without them, workers on CPUs run on any. Raises ValueError where there are none on a GPU, which belongs to
    one process, where they do not divide evenly, and for another platform.
    """
    if platform != "cpu" and platform not in _VARIABLES:
        hint = "set neuron_instance and rollout_cores" if platform == "neuron" else "use rollout=inline"
        raise ValueError(f"rollout workers on {platform} are not given devices by themselves: {hint}")
    if cores is None:
        if platform != "cpu":
            raise ValueError(
                f"rollout workers on {platform} need devices of their own: say which with rollout_cores (like 1-3) and "
                "keep the trainer off them, or use rollout=inline"
            )
        return [Place({"JAX_PLATFORMS": "cpu"})] * workers
    numbers = parse_cores(cores)
    if len(numbers) < workers or len(numbers) % workers:
        raise ValueError(f"rollout_cores {cores!r} are {len(numbers)}, which {workers} workers cannot share evenly")
    each = len(numbers) // workers
    shares = [numbers[i * each : (i + 1) * each] for i in range(workers)]
    if platform == "cpu":
        return [Place({"JAX_PLATFORMS": "cpu"}, frozenset(share)) for share in shares]
    return [Place({_VARIABLES[platform]: ",".join(map(str, share))}) for share in shares]


def parse_cores(cores: str) -> list[int]:
    """[0, 2, 3] of "0,2-3". Raises ValueError for anything else, and for a number twice."""
    numbers: list[int] = []
    for part in cores.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"cores are {cores!r}: give numbers and ranges, like 0,2-3")
        numbers += range(int(first), int(last or first) + 1)
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(f"cores are {cores!r}: give each number once, ranges upwards")
    return numbers


@contextmanager
def inherited(place: Place) -> Iterator[None]:
    """A process started inside has this place from its first moment on, and is deaf to Ctrl-C until it unblocks it.

    Another program of the environment would see JAX_PLATFORMS too late: JAX reads it when it is imported, which the
    main module of the trainer may do before the worker's own code runs.
    """
    before = {name: os.environ.get(name) for name in place.environment}
    affinity = os.sched_getaffinity(0) if place.cpus is not None else None
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        if place.cpus is not None:
            os.sched_setaffinity(0, place.cpus)
        os.environ.update(place.environment)
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if affinity is not None:
            os.sched_setaffinity(0, affinity)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
