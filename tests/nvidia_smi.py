"""A program that answers as nvidia-smi would."""

from pathlib import Path

import pytest

UUIDS = ("GPU-5a1c0000-0000-4000-8000-00000000aaaa", "GPU-5a1d0000-0000-4000-8000-00000000bbbb")
TWO_GPUS = f"""0, NVIDIA H200, 1652823001234, 143771, 4, 570.124.06, {UUIDS[0]}
1, NVIDIA H200, [N/A], 143771, 520, 570.124.06, {UUIDS[1]}
"""


def put_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a shell script first in the path, under the name of nvidia-smi."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def put_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch, table: str = TWO_GPUS) -> None:
    """Let the machine have the GPUs of `table`: index, name, serial, memory and memory used in MiB, driver, UUID."""
    put_smi(folder, monkeypatch, f"cat <<'X'\n{table}X")


def put_busy_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch, *apps: tuple[int, str], table: str = TWO_GPUS) -> None:
    """Let the machine have the GPUs of `table`, and on them the processes `apps`, each with the UUID of its GPU.

    Counters of a GPU are its index, five times.
    """
    lines = "".join(f"{pid}, {uuid}\n" for pid, uuid in apps)
    script = f"""for given in "$@"; do case "$given" in --id=*) index="${{given#--id=}}";; esac; done
case "$*" in
*compute-apps*) cat <<'X'
{lines}X
;;
*clocks_event*) echo "$index, $index, $index, $index, $index";;
*) cat <<'X'
{table}X
;;
esac"""
    put_smi(folder, monkeypatch, script)
