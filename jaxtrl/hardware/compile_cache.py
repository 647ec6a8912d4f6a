"""The persistent compile cache: the second run of the same job loads its programs instead of compiling them.

On Neuron it is the compiler's own cache (NEURON_COMPILE_CACHE_URL); elsewhere JAX's persistent cache, which has crashed
on Neuron and stays off there.
"""

import os
import re
import threading
import time
import zlib
from contextlib import suppress
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

OFF = ("off", "none", "false")
_HIT = "/jax/compilation_cache/cache_hits"
CHECKED = "jaxtrl-checked"  # its time: when the entries of a cache were last checked
_ENTRY = "-cache"  # how the names of JAX's entries end
_ZSTD = b"\x28\xb5\x2f\xfd"
_hits = threading.local()  # JAX reports in the thread that compiles
_listening = False


def default_folder() -> Path:
    """`$XDG_CACHE_HOME/jaxtrl/xla`, by default in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxtrl" / "xla"


def enable_compile_cache(setting: str = "auto", backend: str | None = None) -> str | None:
    """Turn the cache on or off for this process. Returns where it is, or None when it is off.

    `setting`: "auto" (JAX_COMPILATION_CACHE_DIR or NEURON_COMPILE_CACHE_URL where set, else the user's cache folder;
    on Neuron the compiler's default place), "off", or a folder (on Neuron also an s3:// address). Raises ValueError
    where a given folder cannot be written; without a writable home folder, "auto" means off.
    """
    if (backend or jax.default_backend()) == "neuron":
        return _enable_neuron(setting)
    _listen()
    if setting.lower() in OFF:
        return _use(None)
    if setting == "auto":
        folder = _jax_folder() or str(default_folder())
        return _use(folder if _is_writable(folder) else None)
    if not _is_writable(setting):
        raise ValueError(f"The compile cache {setting} cannot be written: give another folder, or off.")
    return _use(setting)


def set_compile_effort(effort: str, backend: str | None = None) -> None:
    """On Neuron "low" adds -O1 and "high" -O2 to NEURON_CC_FLAGS, unless a level is given there; elsewhere nothing."""
    flags = os.environ.get("NEURON_CC_FLAGS", "")
    if (backend or jax.default_backend()) == "neuron" and not re.search(r"(^|\s)(-O|--optlevel)", flags):
        os.environ["NEURON_CC_FLAGS"] = f"{flags} {'-O2' if effort == 'high' else '-O1'}".strip()


def _enable_neuron(setting: str) -> str | None:
    jax.config.update("jax_enable_compilation_cache", False)
    if setting.lower() in OFF:
        flags = os.environ.get("NEURON_CC_FLAGS", "")
        os.environ["NEURON_CC_FLAGS"] = f"{flags} --no-cache".strip() if "--no-cache" not in flags else flags
        return None
    if setting != "auto":
        os.environ["NEURON_COMPILE_CACHE_URL"] = setting
    return os.environ.setdefault("NEURON_COMPILE_CACHE_URL", "/var/tmp/neuron-compile-cache")


def _use(folder: str | None) -> str | None:
    jax.config.update("jax_enable_compilation_cache", folder is not None)
    if folder is not None and folder != _jax_folder():
        jax.config.update("jax_compilation_cache_dir", folder)
    if folder is not None:
        if "://" not in folder:
            remove_broken(Path(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()  # JAX decides at its first compile whether there is a cache; decide again
    return folder


def remove_broken(folder: Path) -> list[Path]:
    """Delete the entries of JAX's cache that were cut short; returns them.

    JAX writes entries in place, so that a process killed meanwhile leaves a part, which is never replaced: every later
    run would warn and compile again. Only entries written since the last check are read.
    """
    mark, begin = folder / CHECKED, time.time_ns()
    since = mark.stat().st_mtime_ns if mark.exists() else 0
    broken = []
    for path in sorted(folder.glob(f"*{_ENTRY}")):
        with suppress(FileNotFoundError):  # another process may tidy up at the same time
            if path.stat().st_mtime_ns >= since and not _is_whole(path.read_bytes()):
                path.unlink()
                broken.append(path)
    mark.touch()
    os.utime(mark, ns=(begin, begin))
    return broken


def _is_whole(entry: bytes) -> bool:
    """Whether the compressed data has its end (zstd, which JAX uses where it is installed, cannot be told: True)."""
    if entry.startswith(_ZSTD) and len(entry) > len(_ZSTD):
        return True
    stream = zlib.decompressobj()
    try:
        stream.decompress(entry)
    except zlib.error:
        return False
    return stream.eof


def _jax_folder() -> str | None:
    return getattr(jax.config, "jax_compilation_cache_dir", None)


def _is_writable(folder: str) -> bool:
    if "://" in folder:
        return True  # a remote store: JAX reports what goes wrong
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def cache_hits() -> int:
    """Programs that this thread has loaded from JAX's cache since the cache was first enabled."""
    return getattr(_hits, "count", 0)


def _listen() -> None:
    global _listening
    if not _listening:
        jax.monitoring.register_event_listener(_count)
        _listening = True


def _count(event: str, **_: str | int) -> None:
    if event == _HIT:
        _hits.count = cache_hits() + 1
