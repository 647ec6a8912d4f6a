"""What every command does around its work: the terminal's encoding, and wrong input as one sentence."""

import glob
import io
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jaxtrl.hardware.environment import set_environment
from jaxtrl.hardware.replica_groups import check_mesh
from jaxtrl.trainers.output_folder import begin_folder


def prepare_terminal() -> None:
    """Data may hold what the terminal's encoding lacks; that "PyTorch was not found" is no news here."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def run_command(prog: str, work: Callable[[], object], interrupted: str = "interrupted") -> int:
    """The exit code of `work`: 1 with one sentence on stderr for wrong input (JAXTRL_TRACEBACK=1: all of it), 130 with
    `interrupted` on Ctrl-C."""
    try:
        work()
    except KeyboardInterrupt:
        print(f"{prog}: {interrupted}", file=sys.stderr)
        return _leave(130)
    except (ValueError, TypeError, OSError, FloatingPointError) as error:
        if os.environ.get("JAXTRL_TRACEBACK"):
            raise
        print(f"{prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return _leave(1)
    return 0


def _leave(code: int) -> int:
    """The exit code; one of several processes ends here, without waiting for the others."""
    if "jax" in sys.modules:
        from jaxtrl.train.distributed import leave

        leave(code)
    return code


def start_neuron(args: Any) -> None:
    """Set the environment that `neuron_instance` of a trainer's options asks for, and try what a mesh of several axes
    needs there. Before JAX is imported; raises ValueError where it cannot be set, or where the trial fails."""
    set_environment(
        args.neuron_instance,
        args.neuron_cores,
        compile_effort=args.compile_effort,
        compile_cache=args.compile_cache,
        processes=args.processes(),
    )
    if args.neuron_instance is not None and "jax" not in sys.modules:
        check_mesh(args.mesh_sizes())


def begin_run(args: Any) -> None:
    """Meet the other processes where there are any, and mark the output folder. JAX is imported here, if not before.

    Its start takes seconds, in which a killed job should already be one that can be resumed: one process marks first.
    """
    begin = partial(begin_folder, Path(args.output_dir), args.resume_from_checkpoint, args.to_dict())
    if args.coordinator_address is None:
        begin()
        return
    from jaxtrl.train.distributed import is_main, wait_for_all

    start_several(args)
    if is_main():
        begin()
    wait_for_all("output folder")


def start_several(args: Any) -> None:
    """`jax.distributed.initialize` where `coordinator_address` says that there are several processes."""
    if args.coordinator_address is not None:
        from jaxtrl.train.distributed import start_processes

        start_processes(args.processes(), args.initialization_timeout, args.heartbeat_timeout_seconds)


def flag_names(argv: Sequence[str]) -> set[str]:
    """The options that a command line names, as they are called in the options class."""
    return {text.partition("=")[0].replace("-", "_").strip("_") for text in argv if text.startswith("--")}


def data_sources(args: Any, bundled: Path, bundled_eval: Path) -> tuple[tuple[Any, str], tuple[Any, str] | None]:
    """(source, split) of the training and the evaluation data (None: no evaluation): the bundled ones where neither
    model nor data are named."""
    wanted = args.eval_strategy != "no" or args.eval_on_start
    if args.dataset_name is None:
        if args.model_name_or_path is not None:
            raise ValueError("--dataset_name is missing: name the data to train on (a path, glob or hub id).")
        return (bundled, "train"), (bundled_eval, "train") if wanted else None
    train = (args.dataset_name, args.dataset_train_split)
    if not wanted:
        return train, None
    if args.eval_dataset_name is not None:
        split = "train" if _is_file(args.eval_dataset_name) else args.dataset_test_split
        return train, (args.eval_dataset_name, split)
    if _is_file(args.dataset_name):
        raise ValueError("--eval_dataset_name is missing: eval_strategy is set and a file has no test split.")
    return train, (args.dataset_name, args.dataset_test_split)


def load_data(source: tuple[Any, str], args: Any, streaming: bool = False) -> Any:
    """The data set of a source and its split."""
    from jaxtrl.rows.sources import load_source

    name, split = source
    return load_source(name, split=split, name=args.dataset_config, streaming=streaming)


def _is_file(name: Any) -> bool:
    return not isinstance(name, str) or Path(name).is_file() or glob.has_magic(name)
