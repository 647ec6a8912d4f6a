"""Freed memory is reused: most calls of a CPU program with large arrays cause no page faults.
The memory that programs may use is the machine's or the control group's."""

import subprocess
import sys

import jax
import pytest

from jaxtrl.hardware.memory import device_memory, host_memory

PROGRAM = """
import resource, statistics
from jaxtrl.hardware.memory import keep_freed_memory
assert keep_freed_memory()
import jax, jax.numpy as jnp
run = jax.jit(lambda x: jnp.zeros((1 << 24,)) + x)
faults = []
for _ in range(25):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    jax.block_until_ready(run(1.0))
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(int(statistics.median(faults)))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc's malloc can be told")
def test_keep_freed_memory():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    # Of 16,384 pages of 4 KiB. Not in each call: until the heap has its size, a small array may take the hole.
    assert int(done.stdout) < 1000


def group(root, entry, files):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(entry)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("entry", "files", "expected"),
    [
        ("0::/a/b\n", {"memory.max": "max\n", "a/memory.max": "5000\n", "a/b/memory.max": "max\n"}, 5000),
        ("0::/a\n", {"a/memory.max": "7000\n", "memory.max": "9000\n"}, 7000),
        ("4:cpu,memory:/job\n3:pids:/\n", {"memory/job/memory.limit_in_bytes": "6000\n"}, 6000),
        ("0::/\n", {"memory.max": "max\n"}, None),
    ],
    ids=["the group around", "its own", "version 1", "no limit"],
)
def test_the_limit_of_the_control_group(tmp_path, entry, files, expected):
    whole = host_memory(tmp_path / "absent")
    assert whole > 2**27
    group(tmp_path, entry, files)
    assert host_memory(tmp_path) == (whole if expected is None else expected)


def test_devices_of_a_cpu_share_its_memory():
    device = jax.devices()[0]
    assert device_memory(device, 4) == host_memory() // 4
