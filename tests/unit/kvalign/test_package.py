"""What `import kvalign` gives: quickly, and functions even where modules have the same names."""

import os
import subprocess
import sys

import pytest


def run(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=120
    )


CHECKED = "assert [x.__name__ for x in (kvalign.load, kvalign.convert, kvalign.Codec)] == ['load', 'convert', 'Codec']"


@pytest.mark.parametrize("first", [CHECKED, "import kvalign.convert; from kvalign.load import fetch"])
def test_public_names_are_functions_and_classes(first: str) -> None:
    done = run(f"import kvalign; {first}; {CHECKED}")
    assert done.returncode == 0, done.stderr


def test_importing_is_light_and_unknown_names_are_refused() -> None:
    done = run("import sys, kvalign; assert 'torch' not in sys.modules; kvalign.lode")
    assert done.stderr.endswith("AttributeError: module 'kvalign' has no attribute 'lode'\n")
