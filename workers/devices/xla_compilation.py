"""Calls of the TPU compiler in a process of its own, and the reading of its refusals."""

import json
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ablate.experiments.records.compilation_report import Overflow
from ablate.experiments.system.processes import OWN_PYTHON
from ablate.kernels.xla import compiler as xla_compiler
from ablate.workers.environment_variables import compiler_environment
from ablate.workers.errors import CompilerFailed, CompilerKilled, DeviceMissing

Answer: TypeAlias = Mapping[str, Any]

_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([0-9.]+)([KMGT]?)B?"
_OVERFLOWS: tuple[tuple[Literal["hbm", "vmem"], re.Pattern[str]], ...] = (
    ("hbm", re.compile(rf"\({_SIZE}\) exceeds available HBM \({_SIZE}\)")),
    ("hbm", re.compile(rf"memory space hbm\. Used {_SIZE} of {_SIZE} hbm")),
    ("vmem", re.compile(rf"memory space vmem\. Used {_SIZE} of {_SIZE} vmem")),
    ("vmem", re.compile(rf"Allocation \(size={_SIZE}\) would exceed memory \(size={_SIZE}\)[^\n]*space=vmem")),
    ("vmem", re.compile(rf"allocation with size {_SIZE} and limit {_SIZE} exceeded scoped vmem limit")),
)
"""How releases of libtpu report a step that does not fit: the bytes that it needs, then the available bytes."""

_PROGRAM = "ablate.kernels.xla.compiler"
_LAST_LINES = 5
_LINE_LIMIT = 300  # characters


def ask_compiler(order: xla_compiler.Order, *, folder: Path | None = None) -> Answer:
    """Run the compiler on `order` and return its answer; `folder` keeps the order and the answer as files.

    Raises:
        DeviceMissing: no usable compiler is installed here.
        CompilerKilled: another process killed the compiler's process.
        CompilerFailed: the process ended with another error.

    """
    with tempfile.TemporaryDirectory() as temporary:
        order_file = (folder or Path(temporary)) / "compiler-order.json"
        answer_file = order_file.with_name("compiler-answer.json")
        order_file.write_text(json.dumps(asdict(order)), encoding="utf-8")
        command = [*OWN_PYTHON, "-m", _PROGRAM, str(order_file), str(answer_file)]
        process = subprocess.run(
            command,
            env=compiler_environment(),
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        answer = json.loads(answer_file.read_text(encoding="utf-8")) if answer_file.is_file() else {}
    if process.returncode in (-signal.SIGKILL, -signal.SIGTERM):
        raise CompilerKilled(_how_it_ended(process))
    if process.returncode != 0:
        raise CompilerFailed(_how_it_ended(process))
    if "unusable" in answer:
        raise DeviceMissing(answer["unusable"])
    return dict(answer)


def find_overflow(message: str) -> Overflow | None:
    """Return the memory that a step exceeds, with its numbers; None for a refusal with another reason."""
    for memory, pattern in _OVERFLOWS:
        match = pattern.search(message)
        if match is not None:
            needed, unit, available, other = match.groups()
            return Overflow(memory=memory, needed_bytes=_bytes(needed, unit), available_bytes=_bytes(available, other))
    return None


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])


def _how_it_ended(process: "subprocess.CompletedProcess[str]") -> str:
    code = process.returncode
    how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    lines = [line[:_LINE_LIMIT] for line in process.stderr.splitlines() if line.strip()]
    return "; ".join((f"the compiler's process {how}", *lines[-_LAST_LINES:]))
