"""jaxtrl: post-training of Qwen3 language models in JAX/Flax. The public names, each imported when it is first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtrl.model.config import Qwen3Config
    from jaxtrl.model.hf import load_pretrained, save_pretrained
    from jaxtrl.model.qwen3 import Qwen3
    from jaxtrl.rollout.requests import SamplingParams
    from jaxtrl.rollout.sampler import Sampler
    from jaxtrl.rows.batch import RowBatch
    from jaxtrl.rows.pack import pack_rows
    from jaxtrl.rows.tree import plan_trees, tree_rows
    from jaxtrl.train.grpo import make_grpo_step
    from jaxtrl.train.mesh import make_mesh
    from jaxtrl.train.optimizer import make_optimizer
    from jaxtrl.train.state import TrainState
    from jaxtrl.train.step import make_eval_step, make_score_step, make_sft_step
    from jaxtrl.trainers.grpo_config import AsyncGRPOConfig
    from jaxtrl.trainers.grpo_trainer import AsyncGRPOTrainer
    from jaxtrl.trainers.sft_config import SFTConfig
    from jaxtrl.trainers.sft_trainer import SFTTrainer

_MODULES = {
    "AsyncGRPOConfig": "trainers.grpo_config",
    "AsyncGRPOTrainer": "trainers.grpo_trainer",
    "Qwen3": "model.qwen3",
    "Qwen3Config": "model.config",
    "RowBatch": "rows.batch",
    "SFTConfig": "trainers.sft_config",
    "SFTTrainer": "trainers.sft_trainer",
    "Sampler": "rollout.sampler",
    "SamplingParams": "rollout.requests",
    "TrainState": "train.state",
    "load_pretrained": "model.hf",
    "make_eval_step": "train.step",
    "make_grpo_step": "train.grpo",
    "make_mesh": "train.mesh",
    "make_optimizer": "train.optimizer",
    "make_score_step": "train.step",
    "make_sft_step": "train.step",
    "pack_rows": "rows.pack",
    "plan_trees": "rows.tree",
    "save_pretrained": "model.hf",
    "tree_rows": "rows.tree",
}

__all__ = [
    "AsyncGRPOConfig",
    "AsyncGRPOTrainer",
    "Qwen3",
    "Qwen3Config",
    "RowBatch",
    "SFTConfig",
    "SFTTrainer",
    "Sampler",
    "SamplingParams",
    "TrainState",
    "load_pretrained",
    "make_eval_step",
    "make_grpo_step",
    "make_mesh",
    "make_optimizer",
    "make_score_step",
    "make_sft_step",
    "pack_rows",
    "plan_trees",
    "save_pretrained",
    "tree_rows",
]


def __getattr__(name: str) -> Any:
    # Commands answer a wrong flag at once and set a device's environment before JAX is imported.
    if name not in _MODULES:
        raise AttributeError(f"module 'jaxtrl' has no attribute {name!r}")
    return getattr(import_module(f"jaxtrl.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
