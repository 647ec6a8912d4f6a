"""Published weights: one safetensors file per version in a folder, complete or absent, which other processes map."""

import errno
import fcntl
import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import jax
import ml_dtypes
import numpy as np

from jaxtrl.model.sharding import on_host
from jaxtrl.model.tensor_files import SINGLE_FILE, StoredTensor, TensorSpec, read_header, write_tensors

SHARED_MEMORY = Path("/dev/shm")
VERSIONS_AT_ONCE = 3  # the one that is read, the one that is announced, the one that is written
PREFIX, LOCK = "jaxtrl-weights-", "lock"
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


class WeightsFolder:
    """Where the trainer writes versions; `close` removes the folder.

    `folder` (made if absent; None: shared memory where it has room for three versions of `nbytes` bytes, else the
    temporary folder of the system) gets a folder of its own inside. `dtype` is that of the files: "float32" is exact.
    Raises ValueError for another dtype, OSError where the folder cannot be made.
    """

    def __init__(self, nbytes: int, folder: Path | None = None, dtype: str = "float32"):
        if dtype not in DTYPES:
            raise ValueError(f"the dtype of published weights is {dtype!r}: it must be float32 or bfloat16")
        self.dtype = DTYPES[dtype]
        if folder is None:
            folder = _roomy(nbytes)
        folder.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder)
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder))
        self._lock = _locked(self.folder)
        self.close = weakref.finalize(self, _remove, self.folder, self._lock)  # at exit at the latest

    def write(self, params: Any, version: int) -> Path:
        """Writes the parameters (nested dict of arrays) of this version; the returned path exists once they are whole.

        Raises OSError naming folder and bytes where the disk is full; what was written of them is then removed.
        """
        leaves = flatten(params)
        specs = [TensorSpec(name, tuple(leaf.shape), self.dtype) for name, leaf in leaves]
        arrays = ((name, on_host(leaf).astype(self.dtype, copy=False)) for name, leaf in leaves)
        path = self._path(version)
        path.mkdir(exist_ok=True)
        nbytes = sum(spec.nbytes for spec in specs)
        try:
            write_tensors(path, specs, arrays, max(nbytes, 1))
        except OSError as error:
            shutil.rmtree(path, ignore_errors=True)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise OSError(
                error.errno,
                f"weights of version {version} need {nbytes:,} bytes in {self.folder}, which is full "
                f"({shutil.disk_usage(self.folder).free:,} bytes free): free some, or give another folder for weights",
            ) from None
        return path / SINGLE_FILE

    def remove_before(self, version: int) -> None:
        """Removes all versions older than this one: every reader has a newer one."""
        for path in self.folder.glob("*"):
            if path < self._path(version):
                shutil.rmtree(path, ignore_errors=True)

    def _path(self, version: int) -> Path:
        return self.folder / f"{version:012d}"


def read_weights(path: Path) -> dict[str, Any]:
    """The parameters of a file of `WeightsFolder.write`, mapped: nested dict of numpy arrays that must not be written.

    Raises ValueError naming a file that is truncated or no safetensors file, FileNotFoundError where it is absent.
    """
    if not path.is_file():
        raise FileNotFoundError(f"the published weights {path} are gone: was their folder cleaned up while training?")
    out: dict[str, Any] = {}
    for name, tensor in read_header(path).items():
        *parents, last = name.split("/")
        place = out
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = _mapped(tensor)
    return out


def flatten(params: Any) -> list[tuple[str, Any]]:
    """(name, leaf) of a nested dict, names joined by /."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


def params_nbytes(params: Any, dtype: str = "float32") -> int:
    """Bytes of one version."""
    return sum(leaf.size for leaf in jax.tree.leaves(params)) * DTYPES[dtype].itemsize


def _roomy(nbytes: int) -> Path:
    usable = SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK)
    if usable and shutil.disk_usage(SHARED_MEMORY).free >= VERSIONS_AT_ONCE * nbytes:
        return SHARED_MEMORY
    return Path(tempfile.gettempdir())


def _locked(folder: Path) -> IO[bytes]:
    """The file `lock` of the folder, locked until this process ends. It appears when it is locked already."""
    file = open(folder / "locking", "wb")  # noqa: SIM115
    fcntl.flock(file, fcntl.LOCK_EX)
    os.replace(folder / "locking", folder / LOCK)
    return file


def _remove(folder: Path, lock: IO[bytes]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    lock.close()


def _remove_abandoned(folder: Path) -> None:
    """Removes folders of trainers that were killed together with their workers, so that nobody tidied up."""
    for path in folder.glob(f"{PREFIX}*/{LOCK}"):
        with suppress(OSError), open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)


def _mapped(tensor: StoredTensor) -> np.ndarray:
    if 0 in tensor.shape:
        return np.zeros(tensor.shape, tensor.dtype)
    mapped = np.memmap(tensor.file, tensor.dtype, "r", tensor.offset, tensor.shape)
    return np.asarray(mapped)  # a plain array on the same memory
