"""`python -m jaxtrl.neuron`: what running on AWS Trainium needs beside the trainers.

env   the environment variables of a process with given cores, as shell commands
lint  lowers every device program for Neuron, on a machine without one, and fails on operations that it does not run;
      --config FILE.yaml: those of this configuration, with its options; --compiler: hands them to neuronx-cc too
check on a device: an SFT step and a generation beside the CPU's, and collectives over some of the devices; fails on a
      wrong result
"""

import argparse
import math
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROG = "python -m jaxtrl.neuron"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 1 for wrong input and where something is found."""
    from jaxtrl.trainers.command import run_command

    args = _parser().parse_args(sys.argv[1:] if argv is None else list(argv))
    found: list[int] = []
    code = run_command(PROG, lambda: found.append(_COMMANDS[args.command](args)))
    return code or found[0]


def _parser() -> argparse.ArgumentParser:
    from jaxtrl.hardware.cores import INSTANCES
    from jaxtrl.hardware.environment import ROLES

    parser = argparse.ArgumentParser(
        prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True)
    env = commands.add_parser("env", allow_abbrev=False, help="print the environment of a process")
    env.add_argument("--instance", required=True, choices=INSTANCES, help="EC2 instance type")
    env.add_argument("--cores", help="cores of the process: one (3) or a range (0-3); all where left out")
    env.add_argument("--role", choices=ROLES, default="trainer")
    env.add_argument("--trainer_cores", help="with --role rollout: the trainer's cores, which must be others")
    env.add_argument("--workers", type=int, default=1, help="with --role rollout: workers that share --cores equally")
    env.add_argument("--compile_effort", choices=("low", "high"), default="low")
    env.add_argument("--compile_cache", default="auto", help="folder or s3:// address; off")
    env.add_argument("--coordinator_address", help="several hosts: host:port of process 0")
    env.add_argument("--num_processes", type=int, default=1, help="several hosts: one process each")
    env.add_argument("--process_id", type=int, default=0, help="several hosts: number of this one")
    lint = commands.add_parser("lint", allow_abbrev=False, help="search device programs for what Neuron does not run")
    lint.add_argument("--config", metavar="FILE.yaml", help="options of a trainer; all programs where left out")
    lint.add_argument("--trainer", choices=("sft", "grpo"), help="whose; by default grpo for a file named grpo...")
    lint.add_argument("--compiler", action="store_true", help="compile the programs with neuronx-cc too")
    check = commands.add_parser("check", allow_abbrev=False, help="compare a device with the CPU")
    check.add_argument("--instance", choices=INSTANCES, help="set this instance's environment first")
    check.add_argument("--cores", help="with --instance: cores of the job")
    check.add_argument("--device", choices=("neuron", "cpu"), default="neuron", help="cpu: try the check itself")
    check.add_argument("--group_seconds", type=float, default=600, help="time limit of the collectives")
    return parser


def _env(args: argparse.Namespace) -> int:
    from jaxtrl.hardware.cores import check_disjoint, parse_cores, split_cores
    from jaxtrl.hardware.environment import Processes, cores_of, neuron_environment

    if args.role == "trainer":
        if args.workers != 1 or args.trainer_cores is not None:
            raise ValueError("--workers and --trainer_cores belong to --role rollout")
        parts = [cores_of(args.instance, args.cores)]
    else:
        if args.cores is None:
            raise ValueError("--cores is missing: name the cores of the rollout workers")
        parts = split_cores(args.instance, parse_cores(args.cores), args.workers)
    if args.trainer_cores is not None:
        trainer = cores_of(args.instance, args.trainer_cores)
        check_disjoint({"the trainer": trainer, "the rollout workers": parse_cores(args.cores)})
    processes = None
    if args.coordinator_address is not None:
        processes = Processes(args.coordinator_address, args.num_processes, args.process_id)
    elif args.num_processes != 1 or args.process_id != 0:
        raise ValueError("--coordinator_address is missing: name host:port of process 0")
    for number, cores in enumerate(parts):
        if len(parts) > 1:
            print(f"# worker {number}")
        variables = neuron_environment(
            args.instance,
            cores,
            role=args.role,
            compile_effort=args.compile_effort,
            compile_cache=args.compile_cache,
            processes=processes,
        )
        for name, value in variables.items():
            print(f"export {name}={shlex.quote(value)}")
    return 0


def _lint(args: argparse.Namespace) -> int:
    from jaxtrl.hardware.environment import prepare_cpu_devices

    options = None if args.config is None else _read_options(Path(args.config), args.trainer)
    devices = 1 if options is None else _devices(options)
    prepare_cpu_devices(devices)
    from jaxtrl.hardware.neuron import as_on_neuron
    from jaxtrl.hardware.neuron_compiler import find_compiler
    from jaxtrl.planning.programs import all_programs, config_programs

    if args.compiler:
        find_compiler()
    failed = 0
    with as_on_neuron():
        for program in all_programs() if options is None else config_programs(options, devices):
            failed += not _lint_program(program, options if args.compiler else None, args.compiler)
    if failed:
        print(f"{PROG}: error: {failed} programs are not for Neuron, see above", file=sys.stderr)
    return int(failed > 0)


def _lint_program(program: Any, options: Any, compiles: bool) -> bool:
    """Prints what is found; returns whether the program may run on Neuron."""
    from jaxtrl.hardware.neuron import lint

    findings = lint(program.function, *program.args)
    print(f"{program.name}: {'clean' if not findings else 'not for Neuron'}", flush=True)
    for finding in findings:
        print(f"  {finding}")
    if findings or not compiles:
        return not findings
    if program.devices > 1:
        print(f"  not handed to neuronx-cc: the plugin cuts it into parts for {program.devices} devices first")
        return True
    return _compile(program, options)


def _compile(program: Any, options: Any) -> bool:
    from jaxtrl.hardware.neuron import PLATFORMS
    from jaxtrl.hardware.neuron_compiler import compile_hlo

    lowered = program.function.trace(*program.args).lower(lowering_platforms=PLATFORMS)
    with tempfile.TemporaryDirectory() as folder:
        done = compile_hlo(lowered, _compiler_flags(options), Path(folder))
    size = f"{done.size / 2**20:.1f} MiB" if done.error is None else f"fails: {done.error}"
    print(f"  neuronx-cc: {done.seconds:.1f} s, {size}", flush=True)
    return done.error is None


def _compiler_flags(options: Any) -> str:
    """Those of the configuration's instance, else of the environment, else of a trn2."""
    from jaxtrl.hardware.environment import neuron_environment

    if (options is None or options.neuron_instance is None) and os.environ.get("NEURON_CC_FLAGS"):
        return os.environ["NEURON_CC_FLAGS"]
    instance = (options and options.neuron_instance) or "trn2.3xlarge"
    effort = "low" if options is None else options.compile_effort
    return neuron_environment(instance, range(1), compile_effort=effort)["NEURON_CC_FLAGS"]


def _read_options(path: Path, trainer: str | None) -> Any:
    """The options of a configuration file."""
    from jaxtrl.trainers.arguments import read_config
    from jaxtrl.trainers.options import fields_of

    classes: list[Any]
    if (trainer or ("grpo" if path.name.startswith("grpo") else "sft")) == "sft":
        from jaxtrl.trainers.sft_config import SFTConfig

        classes = [SFTConfig]
    else:
        from jaxtrl.grpo import RewardOptions
        from jaxtrl.trainers.grpo_config import AsyncGRPOConfig

        classes = [AsyncGRPOConfig, RewardOptions]
    values = read_config(classes, path)
    return classes[0](**{name: value for name, value in values.items() if name in fields_of(classes[0])})


def _devices(options: Any) -> int:
    """That a run with these options has, as far as they say it."""
    from jaxtrl.hardware.environment import cores_of

    sizes = options.mesh_sizes()
    if options.neuron_instance is None or "data" in sizes:
        return math.prod(sizes.values())
    return len(cores_of(options.neuron_instance, options.neuron_cores))


def _check(args: argparse.Namespace) -> int:
    from jaxtrl.hardware.environment import set_environment
    from jaxtrl.hardware.replica_groups import try_small_groups

    if args.cores is not None and args.instance is None:
        raise ValueError("--instance is missing: it says which cores there are")
    set_environment(args.instance, args.cores)
    trial = try_small_groups(args.group_seconds)  # first: afterwards the cores belong to this process
    worked = f"work for groups of {', '.join(map(str, trial.sizes))}" if trial.sizes else "have no groups to try here"
    print(f"collectives over some of the devices {worked}", flush=True)
    if trial.failure is not None:
        print(f"  then they fail: {trial.failure}; meshes with one axis above 1 only", flush=True)
    import jax

    from jaxtrl.planning.device_check import check_device

    if jax.default_backend() != args.device:
        raise ValueError(f"JAX runs on {jax.default_backend()} here, not on {args.device}: see --instance and --device")
    device, reference = jax.local_devices()[-1], jax.local_devices(backend="cpu")[0]
    outcome = check_device(device, reference)
    for difference in outcome.differences:
        mark = "ok" if difference.is_right else "WRONG"
        print(f"{difference.name}: {difference.value:.2g} (allowed {difference.allowed:g}) {mark}")
    for program in outcome.compiled:
        print(f"{program.name} compiled in {program.device:.1f} s, on the CPU in {program.reference:.1f} s")
    if outcome.wrong:
        names = ", ".join(difference.name for difference in outcome.wrong)
        raise ValueError(f"{device} computes something else than the CPU ({names}): do not train on it")
    print(f"{device} computes what the CPU does")
    return 0


_COMMANDS = {"env": _env, "lint": _lint, "check": _check}

if __name__ == "__main__":
    sys.exit(main())
