"""A program that answers as nvidia-smi would."""

from pathlib import Path

import pytest

TWO_GPUS = """0, NVIDIA H200, 1652823001234, 143771, 4, 570.124.06
1, NVIDIA H200, [N/A], 143771, 520, 570.124.06
"""


def put_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a shell script first in the path, under the name of nvidia-smi."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def put_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch, table: str = TWO_GPUS) -> None:
    """Let the machine have the GPUs of `table`: index, name, serial, memory and memory used in MiB, driver."""
    put_smi(folder, monkeypatch, f"cat <<'X'\n{table}X")
