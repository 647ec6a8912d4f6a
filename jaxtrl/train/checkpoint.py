"""Checkpoints of a training run: written in the background by Orbax, complete or absent, checked before they are read.

A checkpoint is the folder `OUTPUT_DIR/checkpoint-STEP` with two Orbax items, `params` and `state` (what else the run
needs), JSON files, and the model's config and tokenizer files, so that `load_pretrained` and `jaxtrl.convert` read it
as a model. Orbax writes the folder under a temporary name and renames it when everything is on disk: a folder of this
name is complete, and what a killed run left behind has another name.
"""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

from jaxtrl.train.distributed import is_main, wait_for_all

NAME = re.compile(r"checkpoint-(\d+)$")
COMPLETE = "_CHECKPOINT_METADATA"  # Orbax's own
ITEMS = ("params", "state")
TEMPORARY = ocp.utils.TMP_DIR_SUFFIX
REMOVED = ".removed"  # a checkpoint on its way out: renamed first, so that a half deleted folder never counts as one
State = TypeVar("State")


class CheckpointError(ValueError):
    """A checkpoint that is missing, incomplete, or does not fit the run that asks for it."""


def find_checkpoints(folder: str | Path) -> list[Path]:
    """Complete checkpoints directly in `folder`, oldest step first."""
    found = [(int(match[1]), path) for path in Path(folder).glob("checkpoint-*") if (match := NAME.match(path.name))]
    return [path for _, path in sorted(found) if _is_complete(path)]


def step_of(path: str | Path) -> int:
    """The step in a checkpoint's name."""
    return int(str(path).rpartition("-")[2])


def _is_complete(path: Path) -> bool:
    return (path / COMPLETE).is_file() and all((path / item).is_dir() for item in ITEMS)


def remove_leftovers(folder: str | Path) -> list[str]:
    """Delete what a killed run left in `folder`: half-written and half-deleted checkpoints. Returns their names."""
    leftovers = [
        path for path in Path(folder).glob("checkpoint-*") if path.name.endswith(REMOVED) or TEMPORARY in path.name
    ]
    for path in leftovers:
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in leftovers]


class CheckpointWriter:
    """Writes `checkpoint-STEP` folders into one folder, in the background, one at a time.

    `limit` keeps that many of the newest checkpoints *of this run* (None: all); older ones are deleted once a newer one
    is complete. The step given as `keep` is never deleted. Checkpoints of other runs in the folder are left alone;
    `steps` are those that this run has saved before it was resumed. `files` (name -> content) go into each checkpoint.
    Of several processes each writes its parts of the arrays; all of them make a writer and call its methods.
    """

    def __init__(
        self,
        folder: str | Path,
        limit: int | None = None,
        steps: tuple[int, ...] = (),
        files: dict[str, bytes] | None = None,
    ):
        if limit is not None and limit < 1:
            raise ValueError(f"save_total_limit must be at least 1, got {limit}.")
        self.folder = Path(folder).absolute()
        self.limit = limit
        self._steps = list(steps)  # complete or being written, oldest first
        self._keep: int | None = None
        self._handler = _Handler(files or {})
        options = ocp.AsyncOptions(post_finalization_callback=self._delete_old)
        self._orbax = ocp.AsyncCheckpointer(self._handler, async_options=options)

    def path(self, step: int) -> Path:
        return self.folder / f"checkpoint-{step}"

    def save(
        self,
        step: int,
        state: Any,
        metadata: dict[str, Any],
        keep: int | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> Path:
        """Start to write `state`, a pytree with `params` and more; returns when it is copied.

        Each entry of `metadata` (JSON values) becomes a file NAME.json, `files` are written as they are. The
        arrays may be donated afterwards. Waits for the write before it, and raises its error. Raises
        CheckpointError where the disk has no room for it.
        """
        self.wait()
        self._handler.own_files = {f"{name}.json": _to_bytes(value) for name, value in metadata.items()}
        self._handler.own_files |= files or {}
        path = self.path(step)
        if is_main():
            self._check_room(step, state)
            if path.exists():
                _remove(path)
        wait_for_all("room for a checkpoint")
        self._keep = keep
        self._steps = [*(s for s in self._steps if s != step), step]
        items = {item: ocp.args.StandardSave(tree) for item, tree in _items(_flat(state)).items()}
        self._orbax.save(path, args=_Arguments(**items))
        return path

    def _check_room(self, step: int, state: Any) -> None:
        """Before anything is written: Orbax on a full disk prints a page for each array and tells at the next save."""
        needed, free = sum(x.nbytes for x in jax.tree.leaves(state)), shutil.disk_usage(self.folder).free
        if needed > free:
            raise CheckpointError(
                f"{self.path(step)} needs {needed:,} bytes but the disk has {free:,} left: free some, lower "
                "save_total_limit, or continue elsewhere from the checkpoint before it."
            )

    def wait(self) -> None:
        """Return when the last checkpoint is complete; raises what went wrong in the background."""
        self._orbax.wait_until_finished()

    def close(self) -> None:
        self.wait()
        self._orbax.close()

    def _delete_old(self) -> None:
        """Runs in the background, after a checkpoint has been completed."""
        if self.limit is None:
            return
        old = [step for step in self._steps[: -self.limit] if step != self._keep]
        for step in old:
            self._steps.remove(step)
            _remove(self.path(step))


def _remove(path: Path) -> None:
    """Delete a checkpoint so that it is complete at one moment and has another name at the next."""
    doomed = path.with_name(path.name + REMOVED)
    shutil.rmtree(doomed, ignore_errors=True)
    if path.exists():
        path.rename(doomed)
        shutil.rmtree(doomed)


class _Handler(ocp.CompositeCheckpointHandler):
    """Adds plain files to the folder before Orbax renames it."""

    def __init__(self, files: dict[str, bytes]):
        super().__init__(**{item: ocp.StandardCheckpointHandler() for item in ITEMS})
        self.files = files
        self.own_files: dict[str, bytes] = {}  # of the checkpoint that is being written

    def finalize(self, directory: Any) -> None:
        super().finalize(directory)
        for name, content in {**self.files, **self.own_files}.items():
            (Path(directory) / name).write_bytes(content)


@ocp.args.register_with_handler(_Handler, for_save=True, for_restore=True)
class _Arguments(ocp.args.Composite):
    """What Orbax wants beside a handler of one's own."""


def _to_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def read_metadata(path: str | Path, name: str) -> Any:
    """The JSON that was saved as `name` with the checkpoint. Raises CheckpointError where there is no complete one."""
    file = _check_complete(path) / f"{name}.json"
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); use another checkpoint.") from None


def restore(path: str | Path, like: State) -> State:
    """The state saved in `path`, with the structure of `like` (arrays or jax.ShapeDtypeStruct, with sharding or not).

    Orbax would cast silently (int32 16777217 to float32 16777216), so names, shapes and dtypes are compared first: any
    difference, a missing and an extra array included, raises CheckpointError.
    """
    path = _check_complete(path)
    wanted = _flat(like)
    with _reading(path) as orbax:
        stored = orbax.metadata(path).item_metadata
        _compare(path, {**_flat({"params": stored["params"].tree}), **_flat(stored["state"].tree)}, wanted)
        target = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_sharding(x)) for name, x in wanted.items()}
        items = {item: ocp.args.StandardRestore(tree) for item, tree in _items(target).items()}
        restored = orbax.restore(path, args=_Arguments(**items))
    leaves = {**_flat({"params": restored["params"]}), **_flat(restored["state"])}
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in wanted])


@contextmanager
def _reading(path: Path) -> Iterator[ocp.Checkpointer]:
    """An Orbax reader whose errors (a file missing inside, a damaged one) name the checkpoint."""
    try:
        with ocp.Checkpointer(_Handler({})) as orbax:
            yield orbax
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise CheckpointError(f"{path} is damaged and cannot be read ({reason}); use another checkpoint.") from error


def _check_complete(path: str | Path) -> Path:
    path = Path(path).absolute()
    if not path.is_dir():
        raise CheckpointError(f"There is no checkpoint at {path}; give a folder named checkpoint-STEP.")
    if not _is_complete(path):
        raise CheckpointError(
            f"{path} is not a complete checkpoint: it lacks its parameters or its state; use another."
        )
    return path


def _compare(path: Path, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    def text(x: Any) -> str:
        return "absent" if x is None else f"{x.dtype}{list(x.shape)}"

    different = [name for name in {**wanted, **stored} if text(stored.get(name)) != text(wanted.get(name))]
    if different:
        name = different[0]
        raise CheckpointError(
            f"{path} does not fit this run: {name} is {text(stored.get(name))} in the checkpoint and "
            f"{text(wanted.get(name))} here ({len(different)} of {len(wanted)} arrays differ); "
            "use the model, optimizer and dtypes that the checkpoint was saved with."
        )


def _sharding(x: Any) -> Any:
    return getattr(x, "sharding", None)


def _flat(tree: Any) -> dict[str, Any]:
    """'params/layers/...' -> leaf, in tree order; one naming for dicts, named tuples and dataclasses."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _items(flat: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The two items as plain nested dicts, which anyone can read with Orbax alone."""
    nested = _nest(flat)
    return {"params": nested.pop("params"), "state": nested}


def _nest(flat: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, leaf in flat.items():
        *parents, last = name.split("/")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return nested
