"""What every command does around its work: the terminal's encoding, and wrong input as one sentence."""

import io
import os
import sys
from collections.abc import Callable
from typing import Any

from jaxtrl.hardware.environment import set_environment


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
        return 130
    except (ValueError, TypeError, OSError, FloatingPointError) as error:
        if os.environ.get("JAXTRL_TRACEBACK"):
            raise
        print(f"{prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


def start_neuron(args: Any) -> None:
    """Set the environment that `neuron_instance` of a trainer's options asks for. Before JAX is imported; raises
    ValueError where it cannot be set."""
    set_environment(
        args.neuron_instance,
        args.neuron_cores,
        compile_effort=args.compile_effort,
        compile_cache=args.compile_cache,
    )
