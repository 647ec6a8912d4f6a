"""The files of one run in its output folder: metrics, trackers' logs, checkpoints, and which run they belong to."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrl.train.checkpoint import CheckpointWriter, remove_leftovers
from jaxtrl.trainers import saving
from jaxtrl.trainers.config import TrainConfig
from jaxtrl.trainers.logging import Metrics, MetricsFile, log_table, open_trackers, trim_metrics
from jaxtrl.trainers.output_folder import METRICS_FILE, lock_folder, start_run


class Run:
    """Opened when training begins, closed when it ends, however it ends.

    `run_id` and `resume_step` are those of the checkpoint that the run continues (None: a new run, whose metrics
    replace those of an earlier run in the folder and which never takes up its checkpoints). `files` go into every
    checkpoint.
    """

    def __init__(
        self, folder: Path, args: TrainConfig, run_id: str | None, resume_step: int | None, files: dict[str, bytes]
    ):
        self.folder = folder
        self._lock = lock_folder(folder)
        options = args.to_dict()
        self.run_id = start_run(folder, run_id, options)
        remove_leftovers(folder)
        steps = saving.own_steps(folder, self.run_id)
        self.checkpoints = CheckpointWriter(folder, args.save_total_limit, steps, files)
        trim_metrics(folder / METRICS_FILE, resume_step)
        self._metrics = MetricsFile(folder / METRICS_FILE)
        self._trackers = open_trackers(
            args.report_to or [],
            folder=folder,
            run_name=args.run_name or str(folder),
            project=args.project,
            config=options,
            resume_step=resume_step,
        )

    def log(self, metrics: Metrics, step: int) -> None:
        self._metrics.log(metrics, step)
        for tracker in self._trackers:
            tracker.log(metrics, step)

    def log_table(self, name: str, columns: Mapping[str, Sequence[Any]], step: int) -> None:
        """Equally long columns as a table, in the trackers that have tables: wandb and trackio."""
        log_table(self._trackers, name, columns, step)

    def close(self) -> None:
        """Waits for the checkpoint that is being written."""
        for tracker in self._trackers:
            tracker.close()
        self._metrics.close()
        try:
            self.checkpoints.close()
        finally:
            os.close(self._lock)
