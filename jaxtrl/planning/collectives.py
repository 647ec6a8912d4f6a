"""Counts what a program sends between devices: in its jaxpr, for any size without compiling, and in compiled HLO text.

The jaxpr is that of the sharded step, in which every collective of jaxtrl is written out (`jax.shard_map`); those in
the body of a scan count times its length. Tests hold the two counts of small programs against each other.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

_KINDS = {
    **dict.fromkeys(("psum", "psum_invariant", "pmax", "pmin"), "all-reduce"),
    **dict.fromkeys(("all_gather", "all_gather_invariant", "all_gather_reduced"), "all-gather"),
    **dict.fromkeys(("reduce_scatter", "unreduced_reduce_scatter"), "reduce-scatter"),
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}
# Bytes that a device sends in a ring of n devices, per byte of the whole array, times n / (n - 1).
_RING = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0, "all-to-all": 1.0, "collective-permute": 1.0}


class Collective(NamedTuple):
    """A kind of transfer: an all-gather's array is what comes out, that of the others what goes in, on one device."""

    kind: str
    axes: tuple[str, ...]  # of the mesh; () where a compiled program does not say
    group: int  # devices that take part in one
    dtype: str


class Volume(NamedTuple):
    """Of all transfers of one kind in one run of a program."""

    times: int
    bytes: int  # of the arrays


def wire_bytes(collective: Collective, volume: Volume) -> float:
    """Bytes that a device sends, and receives, with ring algorithms (which are optimal in volume)."""
    return _RING[collective.kind] * volume.bytes * (collective.group - 1) / collective.group


def count_collectives(jaxpr: ClosedJaxpr) -> dict[Collective, Volume]:
    """What one run of the program transfers; groups of one device are left out."""
    counts: Counter[Collective] = Counter()
    sizes: Counter[Collective] = Counter()
    for found, size, times in _walk(jaxpr.jaxpr, {}, 1):
        counts[found] += times
        sizes[found] += size * times
    return {found: Volume(count, sizes[found]) for found, count in counts.items()}


def _walk(jaxpr: Jaxpr, mesh: Mapping[str, int], times: int) -> Iterator[tuple[Collective, int, int]]:
    for eqn in jaxpr.eqns:
        name, inner, repeated = eqn.primitive.name, mesh, times
        if name == "shard_map":
            inner = dict(eqn.params["mesh"].shape)
        elif name == "scan":
            repeated = times * eqn.params["length"]
        elif name in _KINDS:
            yield from _transfers(eqn, mesh, times)
        for value in eqn.params.values():
            for sub in value if isinstance(value, tuple | list) else (value,):
                if isinstance(sub, ClosedJaxpr):
                    yield from _walk(sub.jaxpr, inner, repeated)
                elif isinstance(sub, Jaxpr):
                    yield from _walk(sub, inner, repeated)


def _transfers(eqn: JaxprEqn, mesh: Mapping[str, int], times: int) -> Iterator[tuple[Collective, int, int]]:
    named = eqn.params.get("axes", eqn.params.get("axis_name"))
    axes = tuple(axis for axis in (named if isinstance(named, tuple) else (named,)) if mesh.get(axis, 1) > 1)
    group = math.prod(mesh[axis] for axis in axes)
    if group == 1:
        return
    kind = _KINDS[eqn.primitive.name]
    for x in eqn.outvars if kind == "all-gather" else eqn.invars:
        aval: Any = x.aval
        size = math.prod(aval.shape) * np.dtype(aval.dtype).itemsize
        yield Collective(kind, axes, group, str(aval.dtype)), size, times


# --- the same in compiled HLO ---

_HLO_DTYPES = {"f32": "float32", "bf16": "bfloat16", "s32": "int32", "pred": "bool", "f16": "float16", "u32": "uint32"}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_OPERATION = re.compile(
    r"= (\(.*?\)|\S+) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\((.*)"
)
_CALLED = re.compile(r"(?:to_apply|body|calls)=%?([\w.\-]+)|branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


def count_in_hlo(text: str) -> dict[Collective, Volume]:
    """What one run of a compiled program transfers, from `compiled.as_text()`. Raises ValueError for a loop around
    collectives whose length is not known."""
    bodies: dict[str, list[str]] = {}
    entry, name = "", ""
    for line in text.splitlines():
        if begins := _COMPUTATION.match(line):
            name = begins[2]
            bodies[name] = []
            entry = name if begins[1] else entry
        elif name:
            bodies[name].append(line.strip())
    counts: Counter[Collective] = Counter()
    sizes: Counter[Collective] = Counter()
    for found, size, times in _walk_hlo(bodies, entry, 1):
        counts[found] += times
        sizes[found] += size * times
    return {found: Volume(count, sizes[found]) for found, count in counts.items()}


def _walk_hlo(bodies: Mapping[str, list[str]], name: str, times: int) -> Iterator[tuple[Collective, int, int]]:
    for line in bodies.get(name, ()):
        if operation := _OPERATION.search(line):
            yield from _hlo_transfers(line, operation, times)
            continue  # what it applies is the sum of two numbers
        called = [part for match in _CALLED.finditer(line) for part in (match[1] or match[2]).split(",")]
        if not called:
            continue
        trips = _TRIPS.search(line)
        inside = [item for part in called for item in _walk_hlo(bodies, part.strip().lstrip("%"), 1)]
        if " while(" in line and inside and not trips:
            raise ValueError(f"a loop of unknown length transfers arrays between devices: {line[:120]}")
        length = int(trips[1]) if trips and " while(" in line else 1
        yield from ((found, size, count * length * times) for found, size, count in inside)


def _hlo_transfers(line: str, operation: re.Match, times: int) -> Iterator[tuple[Collective, int, int]]:
    result, kind, start, _ = operation.groups()
    group = _group_size(line)
    if group == 1:
        return
    # A group's whole array is the result of an all-gather and of an all-reduce, and n times that of a reduce-scatter.
    arrays = _ARRAY.findall(result)
    if start and kind == "all-gather":
        arrays = arrays[len(arrays) // 2 :]  # (operands, results)
    for dtype, shape in arrays:
        size = math.prod(int(part) for part in shape.split(",") if part) * _itemsize(dtype)
        whole = size * group if kind == "reduce-scatter" else size
        yield Collective(kind, (), group, _HLO_DTYPES.get(dtype, dtype)), whole, times


def _group_size(line: str) -> int:
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return len(listed[1].split(","))
    if shaped := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(shaped[1])
    if named := re.search(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(.*?\)\))? \{(.*?)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return math.prod(int(sizes[axis.strip().strip("'")]) for axis in named[2].split(","))
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", line):
        return pairs[1].count("{")
    raise ValueError(f"a collective without replica groups: {line[:120]}")


def _itemsize(dtype: str) -> int:
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


def without_axes(volumes: Mapping[Collective, Volume]) -> dict[Collective, Volume]:
    """Volumes by kind, group size and dtype alone, as HLO tells them."""
    counts: dict[Collective, Volume] = {}
    for found, volume in volumes.items():
        key = found._replace(axes=())
        known = counts.get(key, Volume(0, 0))
        counts[key] = Volume(known.times + volume.times, known.bytes + volume.bytes)
    return counts
