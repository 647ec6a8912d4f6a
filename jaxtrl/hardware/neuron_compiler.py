"""Hands a program to AWS's compiler neuronx-cc, which needs no device: does it compile, and how long does that take?"""

import shlex
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

COMPILER = "neuronx-cc"
SECONDS = 3600  # after which a compilation counts as hung


class Compilation(NamedTuple):
    """`error` is None where the compiler made `size` bytes of a program."""

    seconds: float
    size: int
    error: str | None


def find_compiler() -> str:
    """Its path; raises ValueError where it is not installed."""
    path = shutil.which(COMPILER)
    if path is None:
        raise ValueError(f"{COMPILER} is not installed here: install the extra `neuron`, or leave --compiler out")
    return path


def compile_hlo(lowered: Any, flags: str, folder: Path) -> Compilation:
    """Run neuronx-cc on a program lowered for platform `neuron`; `flags` as in NEURON_CC_FLAGS. Files stay in `folder`.

    Only for programs of one device: those of a mesh are cut apart by the PJRT plugin before the compiler sees them.
    """
    source, result = folder / "program.hlo.pb", folder / "program.neff"
    source.write_bytes(lowered.compiler_ir("hlo").as_serialized_hlo_module_proto())
    command = [find_compiler(), "compile", "--framework", "XLA", str(source), "--output", str(result)]
    start, error = time.perf_counter(), None
    try:
        done = subprocess.run(
            [*command, *shlex.split(flags)], cwd=folder, capture_output=True, text=True, timeout=SECONDS
        )
        if done.returncode:
            lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
            error = f"exit code {done.returncode}: {lines[-1] if lines else 'no message'}"
        elif not result.is_file():
            error = f"{COMPILER} ended well but wrote no {result.name}"
    except subprocess.TimeoutExpired:
        error = f"not done after {SECONDS} s"
    return Compilation(time.perf_counter() - start, result.stat().st_size if result.is_file() else 0, error)
