"""Freed memory is reused: a CPU program with large arrays causes no page faults from its second or third call on."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource
from jaxtrl.hardware.memory import keep_freed_memory
assert keep_freed_memory()
import jax, jax.numpy as jnp
run = jax.jit(lambda x: jnp.zeros((1 << 24,)) + x)
for _ in range(8):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    jax.block_until_ready(run(1.0))
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc's malloc can be told")
def test_keep_freed_memory():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1000  # of 16,384 pages of 4 KiB
