"""What the machine at hand can do at most: its matrix-product rate and its copy bandwidth."""

import os
import statistics
import time

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def matmul_rate(dtype: DTypeLike = jnp.float32, size: int = 2048, repeats: int = 9) -> float:
    """FLOP/s of `[size, size] x [size, size]` products in `dtype`, accumulated in float32, through XLA.

    All their FLOPs over all their seconds: a long program meets the slow moments of a shared machine as well.
    """
    a = jnp.ones((size, size), dtype)
    product = jax.jit(lambda x, y: jnp.dot(x, y, preferred_element_type=jnp.float32))
    product(a, a).block_until_ready()
    start = time.perf_counter()
    for _ in range(repeats):
        product(a, a).block_until_ready()
    return 2 * size**3 * repeats / (time.perf_counter() - start)


def copy_rate(size: int = 2**26, repeats: int = 7) -> float:
    """Median bytes per second, read and written, of passing over `size` float32 numbers in place through XLA.

    In place, since a copy to new memory measures how fast the system hands out pages.
    """
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = step(jnp.ones(size, jnp.float32)).block_until_ready()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        x = step(x).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 2 * x.nbytes / statistics.median(seconds)


def peak_rss_gib() -> float:
    """Peak resident memory of this process so far, in GiB."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def rss_gib() -> float:
    """Resident memory of this process now, in GiB (Linux; elsewhere its peak)."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[1])
    except OSError:
        return peak_rss_gib()
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**30
