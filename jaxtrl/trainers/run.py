"""The files of one run in its output folder: metrics, trackers' logs, checkpoints, and which run they belong to."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxtrl.train.checkpoint import CheckpointWriter, remove_leftovers
from jaxtrl.train.distributed import is_main, wait_for_all
from jaxtrl.trainers import saving
from jaxtrl.trainers.config import TrainConfig
from jaxtrl.trainers.logging import Metrics, MetricsFile, Tracker, log_table, open_trackers, trim_metrics
from jaxtrl.trainers.output_folder import METRICS_FILE, lock_folder, start_run


class Run:
    """Opened when training begins, closed when it ends, however it ends.

    `run_id` and `resume_step` are those of the checkpoint that the run continues (None: a new run, whose metrics
    replace those of an earlier run in the folder and which never takes up its checkpoints). `files` go into every
    checkpoint. Of several processes only the main one has the folder and its logs; checkpoints are written by all.
    """

    def __init__(
        self, folder: Path, args: TrainConfig, run_id: str | None, resume_step: int | None, files: dict[str, bytes]
    ):
        self.folder, self.run_id = folder, run_id or ""
        self._lock: int | None = None
        self._metrics: MetricsFile | None = None
        self._trackers: list[Tracker] = []
        wait_for_all("checkpoints are read")
        if is_main():
            self._open(args, run_id, resume_step)
        wait_for_all("output folder is open")
        steps = saving.own_steps(folder, self.run_id)
        self.checkpoints = CheckpointWriter(folder, args.save_total_limit, steps, files)

    def _open(self, args: TrainConfig, run_id: str | None, resume_step: int | None) -> None:
        folder, options = self.folder, args.to_dict()
        self._lock = lock_folder(folder)
        self.run_id = start_run(folder, run_id, options)
        remove_leftovers(folder)
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
        if self._metrics is not None:
            self._metrics.log(metrics, step)
        for tracker in self._trackers:
            tracker.log(metrics, step)

    def log_table(self, name: str, columns: Mapping[str, Sequence[Any]], step: int) -> None:
        """Equally long columns as a table, in the trackers that have tables: wandb and trackio."""
        log_table(self._trackers, name, columns, step)

    def close(self, is_complete: bool) -> None:
        """Waits for the checkpoint that is being written; after an error in one of several processes it does not: the
        others wait for that process elsewhere."""
        for tracker in self._trackers:
            tracker.close()
        if self._metrics is not None:
            self._metrics.close()
        try:
            if is_complete or jax.process_count() == 1:
                self.checkpoints.close()
        finally:
            if self._lock is not None:
                os.close(self._lock)
