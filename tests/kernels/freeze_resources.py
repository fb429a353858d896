"""`python -m tests.kernels.freeze_resources`: store what the kernels cost after a change that was wanted."""

import json
import sys
import tempfile
from pathlib import Path

from tests.kernels.resources import CASES, TABLE, compile_cases, nvcc_release, table

if __name__ == "__main__":
    if nvcc_release() is None:
        sys.exit("no nvcc on PATH: the kernels cannot be compiled here")
    with tempfile.TemporaryDirectory() as cache:
        found = compile_cases(CASES, Path(cache))
    if failed := {name: case["failed"] for name, case in found.items() if "failed" in case}:
        sys.exit(f"not stored: {json.dumps(failed, indent=1)}")
    TABLE.write_text(json.dumps(table(found), indent=1) + "\n")
