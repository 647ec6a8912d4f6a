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
        "lr_scheduler_type": "constant",  # one program for any number of steps
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


def even_ids(completion_ids, **_):
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


def train_grpo(folder: Path, **options):
    """Two epochs of 8 prompts, two groups a step; prompts and metrics of each step go to trained-PROCESS.json."""
    from jaxtrl import AsyncGRPOConfig, AsyncGRPOTrainer

    defaults = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "num_generations": 4,
        "max_completion_length": 6,
        "num_train_epochs": 2,
        "learning_rate": 1e-3,
        "beta": 0.1,
        "save_steps": 4,
        "rollout_slots": 4,
        "max_staleness": 1,
        "eval_strategy": "steps",
        "eval_steps": 4,
    }
    prompts = [{"prompt": f"{a} + 1 ="} for a in range(8)]
    args = AsyncGRPOConfig(**{**defaults, **options})
    trainer = AsyncGRPOTrainer(
        str(folder.parent / "model"), even_ids, args, train_dataset=prompts, eval_dataset=prompts[:3]
    )
    steps, make_batch = [], trainer._make_batch

    def recorded(scored):
        steps.append([group.row for group in scored.groups])
        return make_batch(scored)

    trainer._make_batch = recorded
    trainer.train()
    logs = [
        {k: v for k, v in log.items() if "reward" in k or k in ("step", "loss")} for log in trainer.state.log_history
    ]
    (folder / f"trained-{args.process_id}.json").write_text(json.dumps({"steps": steps, "logs": logs}))


if __name__ == "__main__":
    if sys.argv[1] == "grpo":
        train_grpo(Path(sys.argv[2]), **json.loads(sys.argv[3]))
    else:
        run(Path(sys.argv[1]), 2 * DEVICES, **json.loads(sys.argv[2]))
