"""Several processes of one job, by `jax.distributed`: how they meet, what they tell each other, how they end together.

JAX's coordination service, which runs in process 0, notices a process that never comes, dies or falls silent, and then
aborts all others; a collective alone would wait for ever. With one process everything here does nothing.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxtrl.hardware.environment import Processes

LOST = ("Gloo", "NCCL", "UNAVAILABLE", "coordination service")  # in errors of a collective whose peer is gone
_kept: list[Any] = []  # what C calls must not be collected


def start_processes(processes: Processes | None, initialization_timeout: int, heartbeat_timeout_seconds: int) -> None:
    """`jax.distributed.initialize`, before anything starts JAX's backend; nothing where that has been called already.

    `processes` None: JAX finds out about them from what SLURM or Open MPI tell it. Raises ValueError where it cannot,
    and where the backend runs already. Where a process does not come within `initialization_timeout` seconds, or is
    silent for `heartbeat_timeout_seconds` later on, this process ends with exit code 1 and a sentence on stderr.
    """
    if jax.distributed.is_initialized():
        return
    known: dict[str, Any] = {}
    if processes is not None:  # otherwise SLURM would still say which of the devices are ours
        known = {**processes._asdict(), "cluster_detection_method": "deactivate"}
    where = "those that SLURM or Open MPI started" if processes is None else f"{processes.num_processes} processes"
    sentence = (
        f"{where} did not meet within {initialization_timeout} s: start all of them with the same coordinator_address "
        "and num_processes, and see whether they can reach that port of process 0 (initialization_timeout waits longer)"
    )
    _end_at_abort(lambda: sentence)
    jax.config.update("jax_enable_preemption_service", False)  # it would keep SIGTERM from ending the process
    try:
        jax.distributed.initialize(
            **known,
            initialization_timeout=initialization_timeout,
            heartbeat_timeout_seconds=heartbeat_timeout_seconds,
        )
    except (RuntimeError, ValueError, KeyError) as error:
        raise ValueError(f"coordinator_address: {_reason(error, processes)}") from None
    me, count = jax.process_index(), jax.process_count()
    sentence = (
        f"process {me} of {count} ends because another one died, ended with an error or was silent for "
        f"{heartbeat_timeout_seconds} s: look for the first error above and in what the others printed, then start all "
        "of them again, with resume_from_checkpoint to go on from the newest checkpoint"
    )
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, *rest: Any) -> None:
        if isinstance(error, jax.errors.JaxRuntimeError) and any(word in str(error) for word in LOST):
            print(f"{str(error).strip().splitlines()[0]}\njaxtrl: error: {sentence}", file=sys.stderr)
        else:
            previous(kind, error, *rest)
        leave(1)

    sys.excepthook = hook


def _reason(error: Exception, processes: Processes | None) -> str:
    if "before any JAX calls" in str(error):
        return (
            "JAX has computed something already: make the trainer before anything else that uses JAX (give the model "
            "as a path), or call jax.distributed.initialize at the start"
        )
    if processes is None:
        return "auto finds no processes started by SLURM, Open MPI or for Neuron: give HOST:PORT of process 0"
    return f"{processes.coordinator_address} cannot be used ({str(error).strip().splitlines()[0]})"


def _end_at_abort(sentence: Callable[[], str]) -> None:
    """What JAX does about a lost process is a page from C++ and abort(). This adds a last line that says what to do.

    A handler of Python's `signal` would come too late: it runs in the main thread, which waits in a collective.
    """

    def end(_: int) -> None:
        os.write(2, f"jaxtrl: error: {sentence()}\n".encode())
        os._exit(1)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(end)
    _kept.append(handler)
    ctypes.CDLL(None).signal(int(signal.SIGABRT), handler)


def is_main() -> bool:
    """Whether this process is the one that logs and writes what is not sharded."""
    return jax.process_index() == 0


def leave(code: int) -> None:
    """After an error: end this process now, if it is one of several. Its clean end would wait for the others."""
    if jax.distributed.is_initialized() and jax.process_count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait_for_all(name: str) -> None:
    """Returns when all processes have come to this place."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def sum_processes(values: np.ndarray) -> np.ndarray:
    """The sum over all processes, float64; all call it at the same place with as many values."""
    if jax.process_count() == 1:
        return values
    bits = np.ascontiguousarray(values, np.float64).reshape(-1).view(np.int32)  # devices have no float64
    parts = np.asarray(multihost_utils.process_allgather(bits)).view(np.float64)
    return parts.sum(axis=0).reshape(np.shape(values))


def gather_rows(tree: Any) -> Any:
    """NumPy arrays of all rows of a batch, from rows over the devices or from arrays of this process's own rows."""
    return multihost_utils.process_allgather(tree, tiled=True)


def gather_bytes(own: bytes) -> list[bytes]:
    """What each process has given, in the order of the processes."""
    if jax.process_count() == 1:
        return [own]
    sizes = np.asarray(multihost_utils.process_allgather(np.int32(len(own)))).tolist()
    padded = np.zeros(1 << max(*sizes, 2).bit_length(), np.uint8)  # few sizes: each is a small program
    padded[: len(own)] = np.frombuffer(own, np.uint8)
    parts = np.asarray(multihost_utils.process_allgather(padded))
    return [part[:size].tobytes() for part, size in zip(parts, sizes, strict=True)]


def check_same(what: str, checksum: int) -> None:
    """Raises ValueError where `checksum` (below 2**31) is not that of process 0."""
    if jax.process_count() == 1:
        return
    others = np.asarray(multihost_utils.process_allgather(np.int32(checksum))).tolist()
    different = [number for number, other in enumerate(others) if other != others[0]]
    if different:
        raise ValueError(
            f"{what} of process {different[0]} differ from those of process 0: give all processes the same "
            "options, model and data"
        )
