"""Asynchronous GRPO: `python -m jaxtrl.grpo --model_name_or_path DIR --dataset_name prompts.jsonl --reward_funcs NAME`.

Without a model it trains the tiny Qwen3 of `python -m jaxtrl.sft` on bundled sums.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtrl.trainers.options import OptionsType, option

PROG = "python -m jaxtrl.grpo"
DESCRIPTION = (
    "Asynchronous GRPO of a Qwen3 model, with the option names and defaults of TRL. Without --model_name_or_path and "
    "--config it trains the tiny Qwen3 of `python -m jaxtrl.sft` on bundled sums."
)
# What no arguments mean; configs/grpo_tiny.yaml says the same.
TINY = {
    "output_dir": "grpo_output",
    "reward_funcs": "exact_match",
    "max_steps": "250",
    "per_device_train_batch_size": "256",
    "num_generations": "16",
    "max_completion_length": "8",
    "token_budget": "1024",
    "learning_rate": "8e-4",
    "lr_scheduler_type": "linear",
    "warmup_steps": "10",
    "epsilon_high": "0.28",
    "max_staleness": "2",
    "logging_steps": "10",
    "eval_strategy": "steps",
    "eval_steps": "250",
    "eval_on_start": "true",
    "num_generations_eval": "4",
    "save_strategy": "no",
}
OF_BUNDLED_PROMPTS = ("eval_strategy", "eval_steps", "eval_on_start")
TINY_SFT = "tiny_sft"  # the folder of the tiny model inside the output folder
TINY_SFT_EPOCHS = 7  # of its training: with the 4 of jaxtrl.sft it knows too little to be rewarded
TRAINING_PROMPTS = 128  # of the bundled ones, so that each comes often in a short run


@dataclasses.dataclass
class RewardOptions(metaclass=OptionsType):
    """Options of the command beside `AsyncGRPOConfig`, under the name of TRL's grpo command."""

    reward_funcs: str | list[str] = option(  # noqa: RUF009
        "exact_match",
        "Reward functions, several with commas: exact_match, accuracy_reward, reasoning_accuracy_reward, "
        "think_format_reward, length_reward, get_soft_overlong_punishment (max_completion_len 1280, soft_punish_cache "
        "256), or package.module.function.",
        group="rewards",
    )

    def __post_init__(self) -> None:
        given = self.reward_funcs if isinstance(self.reward_funcs, list) else [self.reward_funcs]
        self.reward_funcs = [name.strip() for text in given for name in text.split(",") if name.strip()]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code. Wrong input is one sentence on stderr (JAXTRL_TRACEBACK=1: all of it)."""
    from jaxtrl.trainers.arguments import parse
    from jaxtrl.trainers.command import prepare_terminal, run_command
    from jaxtrl.trainers.grpo_config import AsyncGRPOConfig

    prepare_terminal()
    argv = list(sys.argv[1:] if argv is None else argv)
    classes = [AsyncGRPOConfig, RewardOptions]
    args, rewards = parse(classes, [*tiny_flags(argv), *argv], prog=PROG, description=DESCRIPTION)
    goes_on = "interrupted; --resume_from_checkpoint true goes on from the newest checkpoint"

    return run_command(PROG, lambda: _run(args, rewards.reward_funcs), goes_on)


def tiny_flags(argv: Sequence[str]) -> list[str]:
    """The options of the embedded default, unless the user names a model or a configuration.

    With other data, those that belong to the bundled prompts are left out.
    """
    from jaxtrl.trainers.command import flag_names

    names = flag_names(argv)
    if names & {"config", "model_name_or_path"}:
        return []
    own_data = "dataset_name" in names
    chosen = {name: value for name, value in TINY.items() if not (own_data and name in OF_BUNDLED_PROMPTS)}
    return [f"--{name}={value}" for name, value in chosen.items()]


def _run(args: Any, reward_funcs: list[str]) -> None:
    from jaxtrl.assets import eval_prompts_path, prompts_path
    from jaxtrl.trainers.command import begin_run, data_sources, load_data, start_neuron

    start_neuron(args)
    begin_run(args)
    import jax

    from jaxtrl.hardware.memory import keep_freed_memory
    from jaxtrl.trainers.checks import check_files
    from jaxtrl.trainers.grpo_config import AsyncGRPOConfig
    from jaxtrl.trainers.grpo_report import rewards_line
    from jaxtrl.trainers.grpo_trainer import AsyncGRPOTrainer

    if jax.default_backend() == "cpu":
        keep_freed_memory()
    model: Any = args.model_name_or_path
    if model is not None:  # what is wrong with it is said before the data is read
        model = check_files(model, args, AsyncGRPOConfig).source
    sources = data_sources(args, prompts_path(), eval_prompts_path())
    train, evaluation = (None if source is None else load_data(source, args) for source in sources)
    if args.dataset_name is None:
        bundled: Any = train
        train = bundled.select(range(TRAINING_PROMPTS))
    if model is None and args.coordinator_address is not None:
        raise ValueError("model_name_or_path is missing: several processes need a model that is there already.")
    if model is None:
        model = tiny_sft_model(Path(args.output_dir) / TINY_SFT, args)
    trainer = AsyncGRPOTrainer(model, [*reward_funcs], args, train_dataset=train, eval_dataset=evaluation)
    trainer.train()
    if args.save_strategy == "no":
        trainer.save_model()
    trainer.display.say(rewards_line(trainer.state.log_history))


def tiny_sft_model(folder: Path, args: Any) -> Path:
    """The folder of the model of `python -m jaxtrl.sft` without arguments, trained into it if it is not there, for more
    epochs."""
    from jaxtrl import sft

    if not (folder / "model.safetensors").is_file():
        print(f"training the tiny model of python -m jaxtrl.sft for {TINY_SFT_EPOCHS} epochs in {folder}", flush=True)
        flags = [f"--output_dir={folder}", f"--compile_cache={args.compile_cache}", "--resume_from_checkpoint=auto"]
        flags += [f"--num_train_epochs={TINY_SFT_EPOCHS}", "--logging_steps=50"]
        if sft.main(flags):
            raise ValueError(f"the tiny model could not be trained into {folder}: see above")
    return folder


if __name__ == "__main__":
    sys.exit(main())
