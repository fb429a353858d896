"""GPUs that the real client of the driver's library sees, in a library that is compiled here; and a fake nvidia-smi.

The library answers from a text file (fake_nvml.c describes it). It is loaded before the client asks for one of its
name, so the loader gives the client this one.
"""

import ctypes
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

MIB, GIB = 2**20, 2**30
UUIDS = ("GPU-5a1c0000-0000-4000-8000-00000000aaaa", "GPU-5a1d0000-0000-4000-8000-00000000bbbb")
TWO_GPUS = f"""0, NVIDIA H200, 1652823001234, 143771, 4, 570.124.06, {UUIDS[0]}
1, NVIDIA H200, [N/A], 143771, 520, 570.124.06, {UUIDS[1]}
"""
ABSENT, UNKNOWN, NOT_AVAILABLE = 12, 999, 2**64 - 1
"""Of the library: error codes, it is not there and it failed; and the size of a process that it does not know."""


@dataclass(frozen=True, kw_only=True)
class FakeGpu:
    """A GPU or a slice of one. `without` names queries that it does not support; `broken` fail with a code each."""

    name: str
    uuid: str
    serial: str | None = None
    total: int = 80 * GIB
    used: int = 0
    capability: str = "9.0"
    display: bool = False
    clock: int = 1980
    energy_mj: int | None = None
    slices: Sequence["FakeGpu"] = ()
    without: frozenset[str] = frozenset()
    broken: dict[str, int] = field(default_factory=dict)

    def lines(self, kind: str = "gpu") -> list[str]:
        answers = {
            "Name": self.name,
            "Serial": self.serial,
            "MemoryInfo": f"{self.used}/{self.total}",
            "CudaComputeCapability": self.capability,
            "DisplayActive": int(self.display),
            "ClockInfo": self.clock,
            "TotalEnergyConsumption": self.energy_mj,
            "MigMode": int(bool(self.slices)),
            "ComputeRunningProcesses": "",
        }
        answers |= {query: f"!{code}" for query, code in self.broken.items()}
        answers = {query: value for query, value in answers.items() if value is not None and query not in self.without}
        own = "|".join([kind, self.uuid, *(f"{query}={value}" for query, value in answers.items())])
        return [own, *(line for one in self.slices for line in one.lines("mig"))]


@cache
def _load() -> ctypes.CDLL:
    source = Path(__file__).with_name("fake_nvml.c")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "libnvidia-ml.so.1")
        command = ["cc", "-shared", "-fPIC", "-Wall", "-Werror", f"-Wl,-soname,{library.name}", "-o", library, source]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(library))


def put_driver(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: Sequence[FakeGpu] = (),
    *,
    apps: Sequence[tuple[int, str] | tuple[int, str, int | None]] = (),
    driver: str = "570.124.06",
    error: int = 0,
) -> None:
    """Let the machine have these GPUs, and on them the processes `apps`, each with its UUID and its bytes."""
    _load()
    lines = [f"driver|{driver}", f"error|{error}", *(line for gpu in gpus for line in gpu.lines())]
    for pid, uuid, *size in apps:
        lines.append(f"app|{uuid}|{pid}|{NOT_AVAILABLE if size == [None] else (size or [GIB])[0]}")
    state = folder / "nvml.txt"
    state.write_text("".join(f"{line}\n" for line in lines))
    monkeypatch.setenv("FAKE_NVML", str(state))


def put_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a shell script first in the path, under the name of nvidia-smi."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def put_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch, table: str = TWO_GPUS) -> None:
    """Let the machine have the GPUs of `table`: index, name, serial, memory and memory used in MiB, driver, UUID."""
    put_busy_gpus(folder, monkeypatch, table=table)


def put_busy_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch, *apps: tuple[int, str], table: str = TWO_GPUS) -> None:
    """Let the machine have the GPUs of `table`, and on them the processes `apps`, each with the UUID of its GPU.

    Counters of a GPU are its index, five times.
    """
    rows = [line.split(", ") for line in table.splitlines()]
    gpus = [
        FakeGpu(
            name=name,
            serial=None if serial.startswith("[") else serial,
            total=int(total) * MIB,
            used=int(used) * MIB,
            uuid=uuid,
        )
        for _index, name, serial, total, used, _driver, uuid in rows
    ]
    put_driver(folder, monkeypatch, gpus, apps=apps, driver=rows[0][5])
    put_smi(
        folder,
        monkeypatch,
        'for given in "$@"; do case "$given" in --id=*) i="${given#--id=}";; esac; done\necho "$i, $i, $i, $i, $i"',
    )
