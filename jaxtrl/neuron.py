"""`python -m jaxtrl.neuron`: what running on AWS Trainium needs beside the trainers.

env   the environment variables of a process with given cores, as shell commands
lint  lowers every device program for Neuron, on a machine without one, and fails on operations that it does not run
"""

import argparse
import shlex
import sys
from collections.abc import Sequence

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
    commands.add_parser("lint", allow_abbrev=False, help="search all device programs for what Neuron does not run")
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


def _lint(_: argparse.Namespace) -> int:
    from jaxtrl.hardware.neuron import lint
    from jaxtrl.planning.programs import all_programs

    failed = False
    for name, jitted, arguments in all_programs():
        findings = lint(jitted, *arguments)
        failed |= bool(findings)
        print(f"{name}: {'clean' if not findings else 'not for Neuron'}")
        for finding in findings:
            print(f"  {finding}")
    return int(failed)


_COMMANDS = {"env": _env, "lint": _lint}

if __name__ == "__main__":
    sys.exit(main())
