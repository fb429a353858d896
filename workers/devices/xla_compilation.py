"""Ask the TPU compiler in a process of its own, and read its answer: numbers, or a memory that a step exceeds."""

import json
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TypeAlias

from experiments.records.compilation_report import Overflow
from kernels import xla_compiler
from workers.environment_variables import compiler_environment
from workers.errors import CompilerFailed, CompilerKilled, DeviceMissing

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
"""How releases of libtpu say that a step does not fit: needed, then available."""

_PROGRAM = "kernels.xla_compiler"
_ROOT = Path(xla_compiler.__file__).resolve().parent.parent
_LAST_LINES = 5
_LINE_LIMIT = 300  # characters


def ask_compiler(order: xla_compiler.Order, *, folder: Path | None = None) -> Answer:
    """Run the compiler on `order` and return its answer; `folder` keeps the files of the conversation.

    Raises DeviceMissing when no usable compiler is installed here, CompilerKilled when its process was killed from
    outside, and CompilerFailed when it ended in another way than it should.
    """
    with tempfile.TemporaryDirectory() as own:
        where = folder or Path(own)
        question, answered = where / "compiler-order.json", where / "compiler-answer.json"
        question.write_text(json.dumps(asdict(order)), encoding="utf-8")
        command = [sys.executable, "-m", _PROGRAM, str(question), str(answered)]
        ended = subprocess.run(command, env=compiler_environment(_ROOT), capture_output=True, text=True, check=False)
        answer = json.loads(answered.read_text(encoding="utf-8")) if answered.is_file() else {}
    if ended.returncode in (-signal.SIGKILL, -signal.SIGTERM):
        raise CompilerKilled(_how_it_ended(ended))
    if ended.returncode != 0:
        raise CompilerFailed(_how_it_ended(ended))
    if "unusable" in answer:
        raise DeviceMissing(answer["unusable"])
    return dict(answer)


def find_overflow(message: str) -> Overflow | None:
    """Return which memory the compiler's refusal speaks of, with its numbers; None when it is about something else."""
    for memory, pattern in _OVERFLOWS:
        found = pattern.search(message)
        if found is not None:
            needed, unit, available, other = found.groups()
            return Overflow(memory=memory, needed_bytes=_bytes(needed, unit), available_bytes=_bytes(available, other))
    return None


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])


def _how_it_ended(ended: "subprocess.CompletedProcess[str]") -> str:
    code = ended.returncode
    how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    lines = [line[:_LINE_LIMIT] for line in ended.stderr.splitlines() if line.strip()]
    return "; ".join((f"the compiler's process {how}", *lines[-_LAST_LINES:]))
