"""Model weights as an Orbax checkpoint: `params/` (Orbax) beside config.json and tokenizer files, in one folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

PARAMS = "params"


def is_flax_folder(folder: Path) -> bool:
    """Whether the weights of this checkpoint folder are an Orbax checkpoint."""
    return (folder / PARAMS).is_dir()


def write_params(folder: Path, params: Mapping[str, Any]) -> None:
    """Writes the nested dict of arrays to `folder/params`, in their dtypes. The folder must not hold one already."""
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save((folder / PARAMS).absolute(), params)


def read_params(folder: Path) -> dict[str, Any]:
    """The nested dict of numpy arrays of `folder/params`, in the stored dtypes; ValueError where it is damaged."""
    import orbax.checkpoint as ocp

    path = (folder / PARAMS).absolute()
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            tree = checkpointer.metadata(path).item_metadata.tree
            restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
            return checkpointer.restore(path, ocp.args.PyTreeRestore(restore_args=restore_args))
    except Exception as error:  # Orbax and TensorStore raise a dozen types for a damaged folder
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} is no complete Orbax checkpoint of a model: {reason}") from None
