import subprocess
import sys

import jaxtrl


def test_every_public_name_is_there_under_its_own_name():
    for name in jaxtrl.__all__:
        assert getattr(jaxtrl, name).__name__ == name
    assert set(jaxtrl.__all__) == set(jaxtrl._MODULES)
    assert not hasattr(jaxtrl, "no_such_name")


def test_importing_jaxtrl_imports_no_jax():
    code = "import jaxtrl, sys; sys.exit(any(m in sys.modules for m in ('jax', 'transformers', 'datasets')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
