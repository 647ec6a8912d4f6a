"""What is known about the devices at hand."""

from typing import Any

# Dense bfloat16 matrix products per second of one JAX device, from the vendors' data sheets.
PEAK_BF16_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L4": 121e12,
    "NVIDIA A10": 125e12,
}


def peak_flops(device: Any, dtype: str) -> float | None:
    """FLOP/s that MFU is relative to, or None where it is not known (CPU, other devices, float32)."""
    if dtype != "bfloat16":
        return None
    names = [name for name in PEAK_BF16_FLOPS if device.device_kind.startswith(name)]
    return PEAK_BF16_FLOPS[max(names, key=len)] if names else None


def describe_devices(devices: list[Any]) -> str:
    """`8 x NVIDIA H200 (cuda)`."""
    return f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})"
