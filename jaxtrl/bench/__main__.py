"""`python -m jaxtrl.bench NAME [flags]`: measurements of jaxtrl on the machine at hand."""

import sys

from jaxtrl.bench import sft

BENCHES = {"sft": sft.main}


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in BENCHES:
        named = sys.argv[1:2] != [] and sys.argv[1] not in ("-h", "--help")
        print(
            f"usage: python -m jaxtrl.bench {{{','.join(BENCHES)}}} [--help]", file=sys.stderr if named else sys.stdout
        )
        return 2 if named else 0
    return BENCHES[sys.argv[1]](sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
