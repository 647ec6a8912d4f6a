"""How fast devices exchange data, and how fast a step's transfers are at best.

AWS states bandwidths per chip and per instance (Trn1 and Trn2 architecture pages of the Neuron documentation): of a
trn1.32xlarge and a trn2.48xlarge NeuronLink 384 and 1,024 GB/s per chip, EFA 800 and 3,200 Gbit/s per instance, device
memory 820 and 2,900 GB/s per chip. Each core gets an equal share, since all communicate at the same time. Cores of one
chip are taken to exchange data through its memory, written once and read once; that is an assumption.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from jaxtrl.hardware.cores import Instance, find_instance


class Links(NamedTuple):
    """Bytes per second of a chip (memory, neuronlink) and of an instance (efa)."""

    memory: float
    neuronlink: float
    efa: float


LINKS = {
    "trn1.2xlarge": Links(820e9, 0.0, 0.0),
    "trn1.32xlarge": Links(820e9, 384e9, 100e9),
    "trn2.3xlarge": Links(2.9e12, 0.0, 0.0),
    "trn2.48xlarge": Links(2.9e12, 1024e9, 400e9),
}


class Link(NamedTuple):
    """The slowest link inside a group of devices, and the bytes per second that one core has of it."""

    name: str
    bandwidth: float


def link_of(instance: str, mesh: Mapping[str, int], axes: tuple[str, ...]) -> Link:
    """Of the groups along these mesh axes, devices being numbered with the last axis of `mesh` fastest.

    Raises ValueError where a group needs several instances and this type has no EFA for that.
    """
    kind, links = find_instance(instance), LINKS[instance]
    span, stride = 1, 1
    for axis, size in reversed(list(mesh.items())):
        if axis in axes and size > 1:
            span = stride * size
        stride *= size
    if span <= kind.cores // kind.chips:
        return Link("chip", links.memory / 2 / (kind.cores // kind.chips))
    if span <= kind.cores:
        return Link("NeuronLink", links.neuronlink / (kind.cores // kind.chips))
    if not links.efa:
        raise ValueError(f"a mesh of more than {kind.cores} devices needs several {instance}, which are not connected")
    return Link("EFA", links.efa / kind.cores)


def instances_of(kind: Instance, devices: int) -> int:
    """How many instances have so many cores."""
    return math.ceil(devices / kind.cores)
