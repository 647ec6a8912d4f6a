"""Memory of the host, where CPU programs keep their arrays."""

import ctypes
import sys

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
