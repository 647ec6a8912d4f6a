"""Model weights as an Orbax checkpoint: `params/` (Orbax) beside config.json and tokenizer files, in one folder."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

PARAMS = "params"


def is_flax_folder(folder: Path) -> bool:
    """Whether the weights of this checkpoint folder are an Orbax checkpoint."""
    return (folder / PARAMS).is_dir()


def write_params(folder: Path, params: Mapping[str, Any]) -> None:
    """Writes the nested dict of numpy arrays to `folder/params`, in their dtypes. It must not hold a checkpoint
    already.
    """
    import orbax.checkpoint as ocp

    # One uncompressed Zarr array per parameter, written from where it is: Orbax's defaults hold two more copies of
    # the model in memory, and weights do not compress.
    numpy_handler = ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)
    with _quiet():
        registry = ocp.type_handlers.create_type_handler_registry((np.ndarray, numpy_handler))
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False, type_handler_registry=registry)
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save((folder / PARAMS).absolute(), params)


def read_params(folder: Path) -> dict[str, Any]:
    """The nested dict of numpy arrays of `folder/params`, in the stored dtypes; ValueError where it is damaged.

    Arrays are restored one after the other, so that an error names its array and leaves no other read behind.
    """
    import orbax.checkpoint as ocp

    leaves, treedef = jax.tree_util.tree_flatten_with_path(read_shapes(folder))
    arrays: list[np.ndarray] = []
    for keys, _ in leaves:
        with _opened(folder, jax.tree_util.keystr(keys, simple=True, separator=".")) as (checkpointer, path):
            item, restore_args = (_nest(keys, leaf) for leaf in (0, ocp.RestoreArgs(restore_type=np.ndarray)))
            args = ocp.args.PyTreeRestore(item, restore_args=restore_args, partial_restore=True)
            arrays += jax.tree.leaves(checkpointer.restore(path, args))
    return jax.tree_util.tree_unflatten(treedef, arrays)


def read_shapes(folder: Path) -> dict[str, Any]:
    """The same nested dict with what has `shape` and `dtype` in place of the arrays, which are not read."""
    with _opened(folder, "its metadata") as (checkpointer, path):
        return checkpointer.metadata(path).item_metadata.tree


@contextmanager
def _opened(folder: Path, name: str) -> Iterator[tuple[Any, Path]]:
    """(Orbax reader, path of the parameters); what goes wrong inside is one ValueError, which says what was read."""
    import orbax.checkpoint as ocp

    path = (folder / PARAMS).absolute()
    try:
        with _quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            yield checkpointer, path
    except Exception as error:  # Orbax and TensorStore raise a dozen types for a damaged folder
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{path} is no complete Orbax checkpoint of a model: {name} cannot be read ({reason})"
        ) from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Orbax warns through absl about what is meant here (no jax.Array, no OCDBT) or raised anyway."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _nest(keys: Any, leaf: Any) -> Any:
    """{"a": {"b": leaf}} for the path a, b."""
    for key in reversed(keys):
        leaf = {key.key: leaf}
    return leaf
