"""Memory of the host, where CPU programs keep their arrays, and of devices."""

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # parameters of mallopt, <malloc.h>


def keep_freed_memory() -> bool:
    """Make glibc's malloc keep large freed blocks for reuse instead of giving them back to the kernel; is it glibc?

    By default each call of a CPU program maps its temporaries anew and the kernel clears them page by page: measured at
    14 % of the CPU time of a step of a small model with a large vocabulary. The process then stays as large as it ever
    was. Call it before the first array is made; it changes no result.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # One arena: the others cannot hold large blocks except by mapping them.
    return all([mallopt(_ARENA_MAX, 1), mallopt(_MMAP_MAX, 0), mallopt(_TRIM_THRESHOLD, -1)])


def device_memory(device: Any, devices: int) -> int | None:
    """Bytes that programs may use on `device`, one of `devices` of its kind in this process; None where it is unknown.

    On a CPU its share of the machine's memory, or of what the process's control group may use where that is less.
    """
    if device.platform == "cpu":
        return host_memory() // max(devices, 1)
    statistics = device.memory_stats() or {}
    return statistics.get("bytes_limit")


def host_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that this process may use: the machine's, or its control group's limit (version 2 or 1)."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [_group_limit(path) for path in _limit_files(root)]
    return min([total, *(limit for limit in limits if limit is not None)])


def _limit_files(root: Path) -> list[Path]:
    """The files of this process's control group and the groups around it that hold a limit."""
    try:
        entries = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for entry in entries:
        _, controllers, group = entry.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, name = ("memory", "memory.limit_in_bytes") if controllers else ("", "memory.max")
        folder = Path(group.lstrip("/"))
        found += [root / "sys/fs/cgroup" / base / part / name for part in (folder, *folder.parents)]
    return found


def _group_limit(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
