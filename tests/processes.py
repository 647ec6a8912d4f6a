"""A small SFT run for `test_processes.py`: here, or as `python -m tests.processes FOLDER OPTIONS` in one of two."""

import json
import socket
import sys
from pathlib import Path

import numpy as np

DEVICES = 2  # of each process


def token_rows(lengths, seed):
    rng = np.random.default_rng(seed)
    return [{"input_ids": rng.integers(5, 60, n).tolist()} for n in lengths]


def mean_logp(prediction):
    """Depends on every trained token, its place in the data and its target."""
    logp = prediction.predictions[0]
    places = np.arange(1, len(logp) + 1)
    return {
        "mean_logp": float(logp.mean()),
        "places": float(logp @ places),
        "targets": float(prediction.label_ids @ places),
    }


def run(folder: Path, devices: int, **options):
    """The trained SFTTrainer. 13 rows in steps of 4: the last step of an epoch is short, three devices get no row."""
    from jaxtrl import SFTConfig, SFTTrainer
    from jaxtrl.train.mesh import make_mesh

    defaults = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4 // devices,
        "per_device_eval_batch_size": 4 // devices,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "pad_to_multiple_of": "fixed:128",
    }
    is_alone = "coordinator_address" not in options
    trainer = SFTTrainer(
        str(folder.parent / "model"),
        SFTConfig(**{**defaults, **options}),
        train_dataset=token_rows((9, 25, 12, 7, 4, 10, 30, 8, 3, 17, 22, 5, 11), 0),
        eval_dataset=token_rows((8, 14, 5, 20, 9), 1),
        compute_metrics=mean_logp,
        mesh=make_mesh(1, fsdp=devices) if is_alone else None,
    )
    trainer.train()
    return trainer


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


if __name__ == "__main__":
    run(Path(sys.argv[1]), 2 * DEVICES, **json.loads(sys.argv[2]))
