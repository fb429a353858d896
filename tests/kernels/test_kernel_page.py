"""docs/kernels.md names kernels, files and functions that exist, and its examples run."""

import re
import runpy

import pytest

pytest.importorskip("tilelang")

from ablate.kernels.mamba3_mimo.cuda.host.compiled import KERNELS
from tests.architecture.pages import ROOT
from tests.console_blocks import commands_of
from tests.kernels import fuzz_on_cpu
from tests.kernels.fuzz import problems

NAME = "docs/kernels.md"
if not (ROOT / NAME).exists():
    pytest.skip(f"{NAME} is not on this machine", allow_module_level=True)
PAGE = (ROOT / NAME).read_text(encoding="utf-8")
FILES = [*(ROOT / "kernels").rglob("*.py"), *(ROOT / "tests" / "kernels").rglob("*.py")]


def test_every_kernel_is_on_the_page():
    assert {name for name in KERNELS if f"`{name}`" not in PAGE} == set()


def test_functions_and_files_on_the_page_exist():
    text = "\n".join(path.read_text(encoding="utf-8") for path in FILES)
    functions = set(re.findall(r"`(make_\w+)`", PAGE)) - {"make_"}
    assert {name for name in functions if f"def {name}(" not in text} == set()
    assert set(re.findall(r"\b(\w+\.py)\b", PAGE)) - {path.name for path in FILES} == set()


def test_command_line_of_the_page_runs_a_problem():
    (line,) = [match[1] for one in commands_of(NAME) if (match := re.search(r"--only '(.*)'", one.text))]
    assert fuzz_on_cpu.answer(problems.parsed(line)).ending == "right"


def test_example_of_the_page_runs_every_kernel(capsys, tmp_path):
    example = tmp_path / "example.py"
    example.write_text(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1])
    runpy.run_path(str(example))
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} == set(KERNELS)
