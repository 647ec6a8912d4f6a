"""What can be wrong with files, besides the data, is found before any row is read or tokenised."""

from pathlib import Path
from typing import Any

from jaxtrl.model.qwen3 import Qwen3
from jaxtrl.trainers.command import start_neuron
from jaxtrl.trainers.config import TrainConfig
from jaxtrl.trainers.logging import check_trackers
from jaxtrl.trainers.model_source import FoundModel, find_model
from jaxtrl.trainers.output_folder import make_folder
from jaxtrl.trainers.saving import find_resume_path


def check_files(model: str | Path | Qwen3, args: Any, kind: type[TrainConfig]) -> FoundModel:
    """Trackers, the checkpoint to resume from, the output folder (made here), the model's config and its tensors' names
    and shapes. Reads headers only; raises ValueError, FileNotFoundError or TypeError (`args` is no `kind`) with one
    sentence."""
    if not isinstance(args, kind):  # TRL's, where only one import was changed
        given = type(args)
        raise TypeError(f"args must be a jaxtrl.{kind.__name__}, not a {given.__module__}.{given.__qualname__}.")
    start_neuron(args)  # raises where JAX is there already and its environment is another
    check_trackers(args.report_to or [])
    folder = Path(str(args.output_dir))
    find_resume_path(args.resume_from_checkpoint, folder)
    make_folder(folder)
    return find_model(model)
