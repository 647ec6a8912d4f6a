"""What a run writes besides metrics: checkpoints that it can resume from, and the model in Hugging Face format."""

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from jaxtrl.model.config import Qwen3Config
from jaxtrl.rows.order import DataPosition
from jaxtrl.train.checkpoint import CheckpointError, find_checkpoints, read_metadata, step_of
from jaxtrl.trainers.callbacks import TrainerState
from jaxtrl.trainers.output_folder import check_resume, read_run_id


class Resumed(NamedTuple):
    """What is read from a checkpoint besides arrays."""

    path: Path
    run_id: str
    state: TrainerState
    position: DataPosition
    meter: dict[str, Any]
    callbacks: list[dict[str, Any]]


def find_resume_path(resume: bool | str | Path | None, folder: Path) -> Path | None:
    """The checkpoint to resume from: None, the newest complete one of the run in `folder` (True, "auto"), or a path.

    None too where the run was killed before its first checkpoint: it starts again at step 0. Raises ValueError where
    `resume` is True and `folder` holds no run at all ("auto" then starts one) and where a path is no checkpoint.
    """
    if resume is None or resume is False:
        return None
    if resume is not True and resume != "auto":
        read_metadata(resume, "run")
        return Path(resume)
    check_resume(resume, folder)
    run_id = read_run_id(folder)
    own = [path for path in find_checkpoints(folder) if run_id in (None, read_metadata(path, "run")["run_id"])]
    return own[-1] if own else None


def describe_start(resume: bool | str | Path | None, path: Path | None, folder: Path) -> list[str]:
    """What is said of the checkpoint `path` that `find_resume_path` gave for `resume`, and of others in `folder`."""
    if path is not None:
        return [f"resuming from {path}"]
    lines = [f"no checkpoint of this run in {folder} yet: starting at step 0"] if resume else []
    if others := find_checkpoints(folder):
        end = "it is not continued, and replaced when this run comes to its step"
        lines.append(f"{others[-1]} is of an earlier run: {end}")
    return lines


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


def companion_files(
    config: Qwen3Config, tokenizer: PreTrainedTokenizerBase, source: Path | None = None
) -> dict[str, bytes]:
    """What makes a checkpoint a model that can be loaded and converted: config.json, the tokenizer's files and the
    generation_config.json of `source`, the folder that the model came from."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    if source is not None and (generation := source / "generation_config.json").is_file():
        files[generation.name] = generation.read_bytes()
    return {**files, "config.json": (json.dumps(config.to_dict(), indent=2) + "\n").encode()}
