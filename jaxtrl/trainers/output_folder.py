"""The output folder before a run: can it be written, and does it hold a run that can be taken up again?

Nothing heavy is imported, so that a command looks at the folder, and marks it as its own, before JAX is started.
"""

import errno
import fcntl
import json
import os
import tempfile
import uuid
from pathlib import Path
from typing import Any

RUN_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)  # of file systems that have none


def has_run(folder: Path) -> bool:
    """Whether a run has left its traces: run.json (written before the first step), metrics or a checkpoint."""
    return any((folder / name).is_file() for name in (RUN_FILE, METRICS_FILE)) or any(folder.glob("checkpoint-*"))


def check_resume(resume: bool | str | Path | None, folder: Path) -> None:
    """Raises ValueError where `resume` is True and `folder` holds no run: a mistyped folder would start a new one."""
    if resume is True and not has_run(folder):
        state = "does not exist" if not folder.exists() else "holds no run of jaxtrl"
        raise ValueError(
            f"resume_from_checkpoint true: output_dir {folder} {state}, so there is nothing to continue: check the "
            "name, start without it, or give auto (a new run where there is none)."
        )


def make_folder(folder: Path) -> None:
    """Makes the output folder; raises ValueError naming the option where it cannot be made or written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        done = "written" if folder.is_dir() else "made"
        raise ValueError(f"output_dir {folder} cannot be {done} ({error.strerror}): give another folder.") from None


def lock_folder(folder: Path) -> int:
    """Locks the folder itself, until the returned descriptor is closed (`os.close`) or this process ends.

    Two runs in one folder would overwrite each other. Raises ValueError while another run trains into `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in NO_LOCKS:
            return descriptor
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise ValueError(
                f"output_dir {folder} is in use by a run that has not ended: give another folder."
            ) from None
        raise
    return descriptor


def begin_folder(folder: Path, resume: bool | str | Path | None, options: dict[str, Any]) -> None:
    """Checks `resume`, makes the folder and leaves run.json in it, so that a job killed at any later moment can be
    taken up again. Traces of an earlier run are left alone: this one may fail before it trains."""
    check_resume(resume, folder)
    make_folder(folder)
    if not has_run(folder):
        start_run(folder, None, options)


def start_run(folder: Path, run_id: str | None, options: dict[str, Any]) -> str:
    """Write run.json (the run's id and options), at once or not at all. Returns the id, a new one where it is None."""
    run_id = run_id or uuid.uuid4().hex
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{RUN_FILE}.tmp"
    try:
        temporary.write_text(json.dumps({"run_id": run_id, "options": options}, indent=2, default=str) + "\n")
        os.replace(temporary, folder / RUN_FILE)
    except OSError as error:
        raise ValueError(f"output_dir {folder}: {temporary.name} cannot be written ({error.strerror}).") from None
    return run_id


def read_run_id(folder: Path) -> str | None:
    """Which run the folder belongs to; older checkpoints of other runs may still lie in it."""
    try:
        return json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))["run_id"]
    except (OSError, ValueError, KeyError):
        return None
