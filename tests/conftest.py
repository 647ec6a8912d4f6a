"""Shapes and dtypes of every jaxtrl signature are checked at run time in the test suite (jaxtyping + beartype)."""

import os

# Most of the time of the suite is LLVM's. Optimised code is run by tests that start processes of their own, and in
# .ci/run by the comparisons with torch.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from jaxtyping import install_import_hook

install_import_hook("jaxtrl", "beartype.beartype")

from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

# No deadline: a machine busy with other work is no failure. CI draws the same examples every time.
settings.register_profile("jaxtrl", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("jaxtrl")

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder ../shared/data of real data; the test is skipped where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("../shared is absent: real tokenizer and data are not part of the project")
    return SHARED / "data"


@pytest.fixture(scope="session")
def qwen3_tokenizer(shared_data: Path):
    """The real Qwen3 tokenizer with its stock chat template."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(shared_data / "qwen3-tokenizer")
