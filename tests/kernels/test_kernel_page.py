"""docs/kernels.md says what the code does: kernels, files, functions, switches, costs, and its examples run."""

import json
import re
import runpy
from dataclasses import fields

import pytest

pytest.importorskip("tilelang")

from kernels.mamba3_mimo.cuda.host import scan
from kernels.mamba3_mimo.cuda.host.compiled import KERNELS
from kernels.mamba3_mimo.cuda.pieces.tensors import tensors
from kernels.mamba3_mimo.cuda.shape import ScanShape, Variant
from kernels.mamba3_mimo.problem import Case, make_inputs
from kernels.scan_switches import ScanSwitches
from tests.architecture.pages import ROOT
from tests.console_blocks import commands_of
from tests.kernels import fuzz_on_cpu
from tests.kernels.bench.floors import L2_BYTES, LAUNCHES
from tests.kernels.fuzz import problems

NAME = "docs/kernels.md"
PAGE = (ROOT / NAME).read_text(encoding="utf-8")
FOLDER = ROOT / "kernels" / "mamba3_mimo" / "cuda"
SOURCES = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.rglob("*.py")}
PROGRAM = re.compile(r"@T\.prim_func\n(?: +@takes\(.*\)\n)? +def (\w+)\(")
NOT_OF_THIS_LANE = ("lane",)
PROBLEMS = {"A, ms": "B8 S8192 H16 N64", "B, ms": "B8 S2048 H32 N128"}
"""Column of the table of kernels -> problem of the receipt."""


def table(first: str) -> list[dict[str, str]]:
    """Return the rows of the table whose first column is `first`."""
    head, _, *rows = re.search(rf"^\| {first} \|.*?\n(?=\n|\Z)", PAGE, re.MULTILINE | re.DOTALL)[0].splitlines()
    names, *cells = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in (head, *rows))
    return [dict(zip(names, row, strict=True)) for row in cells]


def test_every_kernel_is_in_the_table_with_the_files_that_make_it():
    said = {row["kernel"].strip("`"): sorted(re.findall(r"\[(\w+\.py)\]", row["made in"])) for row in table("kernel")}
    made = {name: [] for text in SOURCES.values() for name in PROGRAM.findall(text)}
    for file, text in sorted(SOURCES.items()):
        for name in PROGRAM.findall(text):
            made[name].append(file)
    assert said == made


def test_every_name_that_the_host_launches_is_in_the_table():
    said = [name for row in table("kernel") for name in re.findall(r"`(\w+)`", row["launched as"])]
    assert sorted(said) == sorted(KERNELS)


def test_buffers_of_the_page_have_the_sizes_and_types_of_the_programs():
    s = ScanShape(B=2, S=256, H=6, G=1, N=64, P=32, R=4, A=16, L=128)
    rows = ScanShape(B=2, S=128, H=6, G=1, N=64, P=32, R=4, A=16, L=128)
    types = {"fp16": "float16", "fp32": "float32", "bf16": "bfloat16", "int32": "int32"}
    known, of_rows = tensors(s), tensors(rows)
    letters = {name: getattr(s, name) for name in (*"BSHNPRAMCL", "sums")} | {"W": s.walks}
    said = {name: row for row in table("buffer") for name in re.findall(r"`(\w+)`", row["buffer"])}
    assert said.keys() - known.keys() == {"start"}
    for name in said.keys() & known.keys():
        sizes = said[name]["shape"].strip("[]").replace("/", "//").split(",")
        size = tuple(eval(size, {}, letters) for size in sizes)  # noqa: S307 - the page is ours
        assert (size, types[said[name]["dtype"]]) == (of_rows if name == "first" else known)[name]


def test_costs_are_those_of_the_receipt():
    section = PAGE.partition("## The kernels\n")[2].partition("\n## ")[0]
    (receipt,) = set(re.findall(r"\((receipts/[^)]*bench-kernels[^)]*)/README\.md\)", section))
    measured = json.loads((ROOT / "docs" / receipt / "speed.json").read_text(encoding="utf-8"))["kernels"]
    found = {(row["name"], row["kernel"]): row for row in measured if row["lane"] == "cuda"}
    for row in table("kernel"):
        for column, problem in PROBLEMS.items():
            one = found.get((problem, row["kernel"].strip("`")))
            assert row[column] == (f"{one['ms']:.3f} / {one['floor_ms']:.3f}" if one else "-")
    floors = {key: row["floor_ms"] / row["ms"] for key, row in found.items() if row["floor_ms"] is not None}
    assert len(floors) > 25
    below = {key for key, share in floors.items() if share > 1}
    launches = {key: LAUNCHES.get(key[1], 1) for key in below}
    assert {key for key in below if found[key]["bytes"] > launches[key] * L2_BYTES} == set()


def test_functions_that_the_page_places_in_a_file_are_there():
    placed = re.findall(r"((?:`\w+`(?:, | and )?)+) \((\w+\.py)\)", PAGE)
    names = [(name, file) for spans, file in placed for name in re.findall(r"`(\w+)`", spans)]
    assert len(names) > 15
    assert [(name, file) for name, file in names if f"def {name}(" not in SOURCES[file]] == []


def test_every_formula_of_the_kernels_is_in_the_table_of_pieces():
    said = [name for row in table("piece") for name in re.findall(r"`(\w+)`", row["its formula in scalar.py"])]
    assert sorted(said) == sorted(re.findall(r"^def ([a-z]\w+)\(", SOURCES["scalar.py"], re.MULTILINE))


def test_functions_and_files_that_the_page_names_exist():
    tree = [*(ROOT / "kernels").rglob("*.py"), *(ROOT / "tests" / "kernels").rglob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in tree)
    called = set(re.findall(r"`(make_\w+)`", PAGE)) - {"make_"}
    assert {name for name in called if f"def {name}(" not in text} == set()
    assert set(re.findall(r"\b(\w+\.py)\b", PAGE)) - {path.name for path in tree} == set()


def test_every_switch_of_the_lane_has_its_row():
    said = [name for row in table("switch") for name in re.findall(r"`(\w+)`", row["switch"])]
    assert sorted(said) == sorted(f.name for f in fields(ScanSwitches) if f.name not in NOT_OF_THIS_LANE)


def test_what_is_kept_between_the_passes_is_what_the_page_says():
    said = re.search(r"Kept between the passes: the inputs, ([\w, ]+) \(and (\w+)\)", PAGE)
    kept = scan.Scan(make_inputs(Case(), "cpu"), Variant(psiv_cache=True)).saved
    assert (*said[1].split(", "), said[2]) == kept


def test_the_command_line_of_the_page_runs_a_problem():
    (line,) = [match[1] for one in commands_of(NAME) if (match := re.search(r"--only '(.*)'", one.text))]
    assert fuzz_on_cpu.answer(problems.parsed(line)).ending == "right"


def test_problems_that_the_page_names_are_problems():
    assert [problems.parsed(line).S for line in re.findall(r"`(\{\"S\".*\})`", PAGE)] == [70]


def test_the_example_of_the_page_runs_every_kernel(capsys, tmp_path):
    example = tmp_path / "example.py"
    example.write_text(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1])
    runpy.run_path(str(example))
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} == set(KERNELS)
