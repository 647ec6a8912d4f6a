"""NeuronCores of AWS Trainium instances, and which sets of them a process may have. Needs neither JAX nor a device.

The figures are AWS's (instance pages and Neuron documentation); cores are logical ones, of which each is a JAX device.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple


class Instance(NamedTuple):
    """What an EC2 instance type has."""

    chips: int
    cores: int  # logical: JAX devices
    counts: tuple[int, ...]  # of cores that a job may use
    core_gib: int  # device memory of a core
    core_flops: float  # bfloat16 products per second of a core
    target: str  # neuronx-cc's name of the chip
    logical_cores: int | None  # physical cores of a logical one (NEURON_LOGICAL_NC_CONFIG); None: not configurable


# trn2 in its default configuration of two physical cores each. With one, the counts that a job may use are not known.
INSTANCES = {
    "trn1.2xlarge": Instance(1, 2, (1, 2), 16, 95e12, "trn1", None),
    "trn1.32xlarge": Instance(16, 32, (1, 2, 8, 32), 16, 95e12, "trn1", None),
    "trn2.3xlarge": Instance(1, 4, (1, 4), 24, 667e12 / 4, "trn2", 2),
    "trn2.48xlarge": Instance(16, 64, (1, 4, 16, 64), 24, 667e12 / 4, "trn2", 2),
}


def find_instance(name: str) -> Instance:
    """Raises ValueError naming the known instance types."""
    if name not in INSTANCES:
        raise ValueError(f"unknown Neuron instance {name!r}: expected one of {', '.join(INSTANCES)}")
    return INSTANCES[name]


def parse_cores(text: str | int) -> range:
    """`3`, `0,1,2,3` or `0-3` (inclusive). Raises ValueError for anything but increasing neighbours."""
    if re.fullmatch(r"\d+", str(text)):
        return range(int(text), int(text) + 1)
    if ends := re.fullmatch(r"(\d+)-(\d+)", str(text)):
        first, last = map(int, ends.groups())
        if first <= last:
            return range(first, last + 1)
    elif re.fullmatch(r"\d+(,\d+)+", str(text)):
        listed = [int(part) for part in str(text).split(",")]
        cores = range(listed[0], listed[-1] + 1)
        if listed == list(cores):
            return cores
        raise ValueError(f"cores {text!r} are not contiguous and increasing: write the first and the last one, as 0-3")
    raise ValueError(f"cores {text!r} are no set of cores: write one (3) or the first and the last one (0-3)")


def format_cores(cores: range) -> str:
    """As NEURON_RT_VISIBLE_CORES takes them."""
    return str(cores[0]) if len(cores) == 1 else f"{cores[0]}-{cores[-1]}"


def allowed_sets(instance: Instance) -> str:
    """The sets of cores that a process may have, in words."""
    sets = []
    for count in instance.counts:
        starts = range(0, instance.cores, count)
        shown = [format_cores(range(start, start + count)) for start in starts]
        sets.append(", ".join(shown) if len(shown) <= 4 else f"{shown[0]}, {shown[1]}, ..., {shown[-1]}")
    return "; ".join(sets)


def check_cores(name: str, cores: range) -> None:
    """Raises ValueError with the allowed sets where one process may not have these cores of instance `name`.

    As many cores as `counts` allows, beginning at a multiple of their number.
    """
    instance = find_instance(name)
    shown, count = format_cores(cores), len(cores)
    allowed = f"allowed are {allowed_sets(instance)}"
    if cores[-1] >= instance.cores:
        raise ValueError(f"cores {shown} reach beyond the {instance.cores} of a {name}: {allowed}")
    if count not in instance.counts:
        raise ValueError(f"cores {shown} are {count}, which a job on {name} may not have: {allowed}")
    if cores[0] % count:
        raise ValueError(f"cores {shown} do not begin at a multiple of {count}: {allowed}")


def check_disjoint(sets: Mapping[str, range]) -> None:
    """Raises ValueError naming the two owners (the keys) and the cores that both would have."""
    seen: list[tuple[str, range]] = []
    for owner, cores in sets.items():
        for other, taken in seen:
            both = range(max(cores[0], taken[0]), min(cores[-1], taken[-1]) + 1)
            if both:
                raise ValueError(
                    f"{other} and {owner} both have cores {format_cores(both)}, but a core belongs to one process: "
                    "give each its own"
                )
        seen.append((owner, cores))


def split_cores(name: str, cores: range, processes: int) -> list[range]:
    """The cores of each of `processes` processes that share `cores`, equally many. Raises ValueError where such
    sets are not allowed."""
    if processes < 1 or len(cores) % processes:
        raise ValueError(
            f"cores {format_cores(cores)} cannot be shared equally by {processes} processes: give a multiple of "
            f"{processes} cores, {allowed_sets(find_instance(name))} to each"
        )
    each = len(cores) // processes
    parts = [range(start, start + each) for start in cores[::each]]
    for part in parts:
        check_cores(name, part)
    return parts
