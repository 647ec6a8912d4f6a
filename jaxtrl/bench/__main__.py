"""`python -m jaxtrl.bench NAME [flags]`: measurements of jaxtrl on the machine at hand."""

import sys

from jaxtrl.bench import asynchronous, combined, generate, grpo, learning, scaling, sft, shapes, tree
from jaxtrl.trainers.command import run_command

BENCHES = {
    "sft": sft.main,
    "tree": tree.main,
    "grpo": grpo.main,
    "combined": combined.main,
    "shapes": shapes.main,
    "generate": generate.main,
    "async": asynchronous.main,
    "learning": learning.main,
    "scaling": scaling.main,
}


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in BENCHES:
        wrong = len(sys.argv) > 1 and sys.argv[1] not in ("-h", "--help")
        usage = f"usage: python -m jaxtrl.bench {{{','.join(BENCHES)}}} [--help]"
        print(usage, file=sys.stderr if wrong else sys.stdout)
        return 2 if wrong else 0
    name, *argv = sys.argv[1:]
    codes: list[int] = []
    return run_command(f"python -m jaxtrl.bench {name}", lambda: codes.append(BENCHES[name](argv))) or codes[0]


if __name__ == "__main__":
    sys.exit(main())
