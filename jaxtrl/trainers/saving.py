"""What a run writes besides metrics: checkpoints that it can resume from, and the model in Hugging Face format."""

import dataclasses
import json
import os
import tempfile
import uuid
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from jaxtrl.model.config import Qwen3Config
from jaxtrl.rows.order import DataPosition
from jaxtrl.train.checkpoint import CheckpointError, find_checkpoints, read_metadata, step_of
from jaxtrl.trainers.callbacks import TrainerState

RUN_FILE = "run.json"


class Resumed(NamedTuple):
    """What is read from a checkpoint besides arrays."""

    path: Path
    run_id: str
    state: TrainerState
    position: DataPosition
    meter: dict[str, Any]
    callbacks: list[dict[str, Any]]


def find_resume_path(resume: bool | str | Path | None, folder: Path) -> Path | None:
    """The checkpoint to resume from: None, the newest complete one of the run in `folder` (True), or a given path.

    Unlike Transformers, True starts a new run where there is no checkpoint yet, so that a job that is killed before its
    first checkpoint can be started again with the same command. A path that is no checkpoint raises CheckpointError.
    """
    if resume is None or resume is False:
        return None
    if resume is not True:
        read_metadata(resume, "run")
        return Path(resume)
    run_id = read_run_id(folder)
    own = [path for path in find_checkpoints(folder) if run_id in (None, read_metadata(path, "run")["run_id"])]
    return own[-1] if own else None


def read_run_id(folder: Path) -> str | None:
    """Which run the folder belongs to; older checkpoints of other runs may still lie in it."""
    try:
        return json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))["run_id"]
    except (OSError, ValueError, KeyError):
        return None


def start_run(folder: Path, run_id: str | None, options: dict[str, Any]) -> str:
    """Write run.json (the run's id and options), at once or not at all. Returns the id, a new one where it is None."""
    run_id = run_id or uuid.uuid4().hex
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{RUN_FILE}.tmp"
    temporary.write_text(json.dumps({"run_id": run_id, "options": options}, indent=2, default=str) + "\n")
    os.replace(temporary, folder / RUN_FILE)
    return run_id


def own_steps(folder: Path, run_id: str) -> tuple[int, ...]:
    """Steps of the complete checkpoints of this run in the folder."""
    own = [path for path in find_checkpoints(folder) if read_metadata(path, "run")["run_id"] == run_id]
    return tuple(step_of(path) for path in own)


def checkpoint_metadata(
    run_id: str,
    state: TrainerState,
    position: DataPosition,
    facts: dict[str, Any],
    meter: dict[str, Any],
    callbacks: list[dict[str, Any]],
) -> dict[str, Any]:
    """The two JSON files of a checkpoint: trainer_state.json as Transformers writes it, and run.json."""
    run = {"run_id": run_id, "position": list(position), "facts": facts, "meter": meter, "callbacks": callbacks}
    return {"trainer_state": dataclasses.asdict(state), "run": run}


def read_checkpoint(path: Path, facts: dict[str, Any]) -> Resumed:
    """Everything but the arrays. Raises CheckpointError where `facts` (what must not change) differ."""
    run = read_metadata(path, "run")
    check_facts(path, run["facts"], facts)
    state = TrainerState(**read_metadata(path, "trainer_state"))
    return Resumed(path, run["run_id"], state, DataPosition(*run["position"]), run["meter"], run["callbacks"])


def check_facts(path: Path, stored: dict[str, Any], current: dict[str, Any]) -> None:
    """What decides the batches and programs of a run has to be what it was; the first difference is named."""
    current = json.loads(json.dumps(current))
    for name in {**stored, **current}:
        if stored.get(name) != current.get(name):
            raise CheckpointError(
                f"{path} cannot be continued with other data or shapes: {name} is {stored.get(name)} in the checkpoint "
                f"and {current.get(name)} here; use the same, or start a new run from its weights "
                f"(--model_name_or_path {path})."
            )


def companion_files(config: Qwen3Config, tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    """config.json and the tokenizer's files, which make a checkpoint a model that can be loaded."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    return {**files, "config.json": (json.dumps(config.to_dict(), indent=2) + "\n").encode()}


def make_folder(folder: Path) -> None:
    """Makes the output folder; raises ValueError naming the option where it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"output_dir {folder} cannot be made ({error.strerror}): give another folder.") from None
