"""`PYTHONPATH=tests python tests/hostile/fuzz_header.py`: coverage-guided where atheris is installed."""

from __future__ import annotations

import tempfile
from pathlib import Path

from support.fuzz.fuzzing import main
from support.fuzz.targets import headers

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        main(headers, Path(directory))
