"""Peaks are known by name, for bfloat16 only."""

from types import SimpleNamespace

import pytest

from jaxtrl.hardware.devices import describe_devices, peak_flops


@pytest.mark.parametrize(
    ("kind", "dtype", "expected"),
    [
        ("NVIDIA H200", "bfloat16", 989e12),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989e12),
        ("NVIDIA L40S", "bfloat16", 362e12),
        ("NVIDIA L4", "bfloat16", 121e12),
        ("NVIDIA H200", "float32", None),
        ("cpu", "bfloat16", None),
    ],
)
def test_peak(kind, dtype, expected):
    assert peak_flops(SimpleNamespace(device_kind=kind), dtype) == expected


def test_description():
    device = SimpleNamespace(device_kind="cpu", platform="cpu")
    assert describe_devices([device, device]) == "2 x cpu (cpu)"
