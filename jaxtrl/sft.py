"""Supervised fine-tuning: `python -m jaxtrl.sft --model_name_or_path Qwen/Qwen3-0.6B --dataset_name data.jsonl`.

Without a model it trains a tiny Qwen3 from scratch on bundled sample chats.
"""

import sys
from collections.abc import Sequence
from typing import Any

PROG = "python -m jaxtrl.sft"
DESCRIPTION = (
    "Supervised fine-tuning of a Qwen3 model, with the option names and defaults of TRL. Without --model_name_or_path "
    "and --config it trains a tiny Qwen3 from scratch on bundled sample chats (the options of configs/sft_tiny.yaml)."
)
# What no arguments mean; configs/sft_tiny.yaml says the same.
TINY = {
    "output_dir": "sft_output",
    "num_train_epochs": "4",
    "per_device_train_batch_size": "2",
    "per_device_eval_batch_size": "2",
    "learning_rate": "3e-3",
    "lr_scheduler_type": "cosine",
    "warmup_steps": "20",
    "max_length": "256",
    "packing": "true",
    "assistant_only_loss": "true",
    "logging_steps": "20",
    "eval_strategy": "steps",
    "eval_steps": "100",
    "save_steps": "100",
    "save_total_limit": "2",
}
OF_SAMPLE_DATA = ("assistant_only_loss", "eval_strategy", "eval_steps")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code. Wrong input is one sentence on stderr (JAXTRL_TRACEBACK=1: all of it)."""
    from jaxtrl.trainers.arguments import parse
    from jaxtrl.trainers.command import prepare_terminal, run_command
    from jaxtrl.trainers.sft_config import SFTConfig

    prepare_terminal()
    argv = list(sys.argv[1:] if argv is None else argv)
    (args,) = parse([SFTConfig], [*tiny_flags(argv), *argv], prog=PROG, description=DESCRIPTION)
    goes_on = "interrupted; --resume_from_checkpoint true goes on from the newest checkpoint"
    return run_command(PROG, lambda: _run(args), goes_on)


def tiny_flags(argv: Sequence[str]) -> list[str]:
    """The options of the embedded default, unless the user names a model or a configuration.

    With other data, those that belong to the bundled chats are left out.
    """
    from jaxtrl.trainers.command import flag_names

    names = flag_names(argv)
    if names & {"config", "model_name_or_path"}:
        return []
    own_data = "dataset_name" in names
    chosen = {name: value for name, value in TINY.items() if not (own_data and name in OF_SAMPLE_DATA)}
    return [f"--{name}={value}" for name, value in chosen.items()]


def _run(args: Any) -> None:
    from jaxtrl.assets import eval_data_path, sample_data_path
    from jaxtrl.trainers.command import begin_run, data_sources, load_data, start_neuron

    start_neuron(args)
    begin_run(args)
    import jax

    from jaxtrl.hardware.compile_cache import enable_compile_cache
    from jaxtrl.hardware.memory import keep_freed_memory
    from jaxtrl.trainers.checks import check_files
    from jaxtrl.trainers.model_source import load_tokenizer, tiny_model
    from jaxtrl.trainers.sft_config import SFTConfig
    from jaxtrl.trainers.sft_trainer import SFTTrainer

    if jax.default_backend() == "cpu":
        keep_freed_memory()
    sources = data_sources(args, sample_data_path(), eval_data_path())
    model: Any = None
    tokenizer = None
    if args.model_name_or_path is not None:  # what is wrong with it is said before the data is read
        model = check_files(args.model_name_or_path, args, SFTConfig).source
        tokenizer = load_tokenizer(model, args.trust_remote_code)
    train, evaluation = (
        None if source is None else load_data(source, args, args.dataset_streaming) for source in sources
    )
    if model is None:
        enable_compile_cache(args.compile_cache)  # before the first compile, that of the initial weights
        model, tokenizer = tiny_model(args.seed)
    trainer = SFTTrainer(model, args, train_dataset=train, eval_dataset=evaluation, processing_class=tokenizer)
    trainer.train()
    if args.save_strategy == "no":
        trainer.save_model()


if __name__ == "__main__":
    sys.exit(main())
