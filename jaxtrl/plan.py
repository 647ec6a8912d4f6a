"""What a run will cost, before it starts: `python -m jaxtrl.plan` with the flags of `python -m jaxtrl.sft`.

Nothing is trained. Programs, padding, compile and step time, sharing and memory are told as text and as plan.json.
"""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROG = "python -m jaxtrl.plan"
DESCRIPTION = """\
What a run of `python -m jaxtrl.sft` with the same flags will cost: programs, padding and time of each kind of shape
set, what prefix sharing saves, and the memory of a device. It reads the data and trains nothing. Without a model and
--config it plans the tiny default run. The two accounts, shape_cost and sharing, are never added up.
With --model_shape it simulates a step on devices that are not here instead: --mesh data=2,fsdp=32 --model_shape 32b
--instance trn2.48xlarge, rows of per_device_train_batch_size * max_length tokens (mesh_plan.json).
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code, 1 also where the run does not fit into the device's memory."""
    from jaxtrl import sft
    from jaxtrl.planning.keys import KEYS
    from jaxtrl.planning.options import PlanConfig
    from jaxtrl.trainers.arguments import parse
    from jaxtrl.trainers.command import flag_names, prepare_terminal, run_command
    from jaxtrl.trainers.sft_config import SFTConfig

    prepare_terminal()
    argv = list(sys.argv[1:] if argv is None else argv)
    keys = "\n".join(f"  {name}: {meaning}" for name, meaning in KEYS.items())
    description = f"{DESCRIPTION}\nKeys of OUTPUT_DIR/plan.json:\n{keys}"
    tiny = [] if "model_shape" in flag_names(argv) else sft.tiny_flags(argv)
    args, options = parse([SFTConfig, PlanConfig], [*tiny, *argv], prog=PROG, description=description)
    return run_command(PROG, lambda: (_run if options.model_shape is None else _simulate)(args, options))


def _simulate(args: Any, options: Any) -> None:
    from rich.console import Console

    from jaxtrl.hardware.cores import find_instance
    from jaxtrl.hardware.environment import prepare_cpu_devices
    from jaxtrl.trainers.output_folder import make_folder

    instance = options.instance or "trn2.48xlarge"
    sizes = args.mesh_sizes() or {"data": find_instance(instance).cores}
    prepare_cpu_devices(math.prod(sizes.values()))  # stand in for the others; nothing runs on them
    from jaxtrl.planning.mesh_plan import plan_mesh, show_mesh_plan

    make_folder(Path(args.output_dir))
    plan = plan_mesh(args, options.model_shape, instance, {"data": 1, **sizes})
    (Path(args.output_dir) / "mesh_plan.json").write_text(json.dumps(plan, indent=2) + "\n", encoding="utf-8")
    show_mesh_plan(plan, Console(width=None if sys.stdout.isatty() else 160))
    if not plan["memory"]["fits"]:
        raise ValueError(plan["memory"]["refusal"])


def _run(args: Any, options: Any) -> None:
    from rich.console import Console

    from jaxtrl.assets import eval_data_path, sample_data_path
    from jaxtrl.planning.document import make_plan
    from jaxtrl.planning.make import find_config, prepare
    from jaxtrl.planning.plot import check_plot, draw
    from jaxtrl.planning.rollouts import read_rollouts
    from jaxtrl.planning.show import show
    from jaxtrl.rows.chat import set_chat_template
    from jaxtrl.trainers.command import data_sources, load_data
    from jaxtrl.trainers.output_folder import make_folder

    if options.plot is not None:
        check_plot(options.plot)
    make_folder(Path(args.output_dir))
    if options.rollouts is not None:
        if args.dataset_name is not None:
            raise ValueError("dataset_name: --rollouts is planned from alone, leave one of them out")
        train, evaluation = read_rollouts(options.rollouts), None
        config, tokenizer = find_config(args)
    else:
        sources = data_sources(args, sample_data_path(), eval_data_path())
        config, tokenizer = find_config(args)  # what is wrong with it is said before the data is read
        train, evaluation = (
            None if source is None else load_data(source, args, args.dataset_streaming) for source in sources
        )
    if args.chat_template_path is not None:
        set_chat_template(tokenizer, args.chat_template_path)
    run = prepare(args, config, tokenizer, train, evaluation)
    plan = make_plan(run, options)
    (Path(args.output_dir) / "plan.json").write_text(json.dumps(plan, indent=2) + "\n", encoding="utf-8")
    show(plan, Console(width=None if sys.stdout.isatty() else 160))
    if options.plot is not None:
        draw(plan, run.foreseen().needs.tokens, options.plot)
    if not plan["memory"]["fits"]:
        raise ValueError(plan["memory"]["refusal"])


if __name__ == "__main__":
    sys.exit(main())
