import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.pages import ROOT, SOURCES, nodes

TESTS = sorted((ROOT / "tests").rglob("*.py"))
MAY_READ_THE_ENVIRONMENT = {
    *("service/settings.py", "service/client/settings.py", "workers/settings.py", "workers/environment_variables.py"),
    "workers/isolation/environment.py",  # what trials inherit, and what is hidden from them
    "experiments/system/http_clients.py",  # variables of curl, OpenSSL and requests, not ours
    "service/cli/commits/forges.py",  # variables of jobs of GitHub and GitLab, not ours
    "service/cli/slurm.py",  # what the programs of Slurm inherit, and what is hidden from them
    "experiments/system/shell_python.py",  # variables of the shell, which name its Python environment, not ours
    "experiments/in_trial/ablate.py",  # it runs in programs of users, which have no settings of ours
    *("kernels/xla/device.py", "kernels/xla/compiler.py"),  # variables of torch_xla and jax, not ours
}
MAY_READ_THE_CLOCK = {
    "tests/integration/slice_schedules.py",  # in which order trainers ran
    "tests/integration/test_clock_steps.py",  # its clocks are moved by hand
    "tests/integration/test_planted.py",  # a receipt says how long its trial took
}
MAX_LINES, MAX_FUNCTION_LINES = 600, 60
MAX_FILES, MAX_FILES_OF_A_FOLDER, SMALL = 549, 22, 60
MAX_KERNEL_LINES = 200  # the reverse walk of the scan is one kernel, and TileLang traces a kernel as one function
"""A TileLang kernel is one function, with its inner one, and reads best in one piece."""
SMALL_AND_SEPARATE: dict[str, str] = {
    "model/training/step_graph.py": "the only code that records CUDA graphs; train.py is long enough",
}
"""Small files with one importer beside them that stay files, and why."""
VAGUE_NAMES = {"utils.py", "common.py", "helpers.py", "misc.py"}


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_files_are_short() -> None:
    lengths = {_name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in (*SOURCES, *TESTS)}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_packages_have_few_files() -> None:
    assert len(SOURCES) <= MAX_FILES


def test_folders_have_few_files() -> None:
    counts = Counter(path.parent.relative_to(ROOT).as_posix() for path in SOURCES if path.name != "__init__.py")
    large = {folder: count for folder, count in counts.items() if count > MAX_FILES_OF_A_FOLDER}
    assert large.keys() == set()


def test_every_folder_has_a_line_in_the_structure_page() -> None:
    page = (ROOT / "docs/structure.md").read_text(encoding="utf-8")
    rows = set(
        re.findall(r"^\| `([a-z0-9_/]+)/` \|", page.partition("## Rooms")[2].partition("\n## ")[0], re.MULTILINE)
    )
    folders = {path.parent.relative_to(ROOT).as_posix() for path in SOURCES}
    folders = {folder for folder in folders if "migrations" not in folder}
    assert rows == folders


def test_no_small_file_serves_one_neighbour_only() -> None:
    importers: dict[str, set[str]] = {}
    for path in SOURCES:
        for module in _imported(path):
            importers.setdefault(module, set()).add(_name(path))
    alone = {
        _name(path): importers[module]
        for path in SOURCES
        if path.stat().st_size
        and len(path.read_text(encoding="utf-8").splitlines()) < SMALL
        and len(importers.get(module := _module(path), ())) == 1
        and _name(path.parent) == _name(ROOT / next(iter(importers[module]))).rpartition("/")[0]
    }
    assert alone.keys() - SMALL_AND_SEPARATE.keys() == set()


def _module(path: Path) -> str:
    return f"ablate.{_name(path).removesuffix('.py').replace('/', '.')}"


def _imported(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports, by either form of an import of a name."""
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_functions_are_short() -> None:
    long = {
        f"{_name(path)}:{node.name}": length
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > _most_lines(path)
        and "versions" not in path.parts
    }
    assert long == {}


def _most_lines(path: Path) -> int:
    of_scan = path.parent.parent.name == "cuda" and path.parent.name != "host"
    generated = of_scan or _name(path) == "kernels/recurrence.py"
    return MAX_KERNEL_LINES if generated else MAX_FUNCTION_LINES


def test_package_inits_are_empty_unless_they_are_a_public_operation() -> None:
    full = [_name(path) for path in SOURCES if path.name == "__init__.py" and path.read_text().strip()]
    assert [name for name in full if not (name.startswith("kernels/") and name.count("/") == 2)] == []


def test_no_file_has_a_name_that_says_nothing() -> None:
    assert [_name(path) for path in SOURCES if path.name in VAGUE_NAMES] == []


def test_only_settings_read_the_environment() -> None:
    readers = {_name(path) for path in SOURCES if _reads_environment(path)}
    assert readers - MAY_READ_THE_ENVIRONMENT == set()


def _reads_environment(path: Path) -> bool:
    """Setting a variable for a library that knows no other way is not reading."""
    written = {id(n.value) for n in nodes(path) if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store)}
    return any(_names_environment(node) for node in nodes(path) if id(node) not in written)


def _names_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
        return node.attr in {"environ", "environb", "getenv"}
    if isinstance(node, ast.ImportFrom) and node.module == "os":
        return any(alias.name in {"environ", "getenv"} for alias in node.names)
    return False


def test_only_the_sink_and_the_server_import_mlflow() -> None:
    importers = {
        _name(path)
        for path in SOURCES
        for node in nodes(path)
        if (isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "mlflow")
        or (isinstance(node, ast.Import) and any(a.name.partition(".")[0] == "mlflow" for a in node.names))
    }
    assert importers == {"experiments/reporting/mlflow/sink.py", "service/stack/mlflow_server.py"}


def test_every_class_name_means_one_thing() -> None:
    homes: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(_name(path))
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


OPERATIONS = sorted({path.parent.name for path in (ROOT / "kernels").glob("*/__init__.py")} - {"xla"})


@pytest.mark.parametrize("operation", OPERATIONS)
def test_only_the_layer_that_calls_an_operation_and_files_of_kernels_spell_its_name(operation: str) -> None:
    strangers = [path for path in SOURCES if operation not in path.parts]
    spelling = [path.relative_to(ROOT) for path in strangers if operation in path.read_text(encoding="utf-8")]
    assert [path.parent.as_posix() for path in spelling if path.parent.as_posix() != "kernels"] == ["model/layers"]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_tests_outside_the_kernels_read_fact_names_from_their_owner(operation: str) -> None:
    strangers = (path for path in TESTS if "kernels" not in path.parts)
    assert [_name(path) for path in strangers if f"{operation}." in path.read_text(encoding="utf-8")] == []


def test_no_test_depends_on_speed() -> None:
    """Only `tests/waiting.py` has a limit, which ends a test that hangs. A poll of a second asks again."""
    kinds = tuple(ROOT / "tests" / kind for kind in ("unit", "integration", "acceptance"))
    places = [
        f"{_name(path)}:{node.lineno}"
        for path in TESTS
        if path.is_relative_to(kinds[0]) or path.is_relative_to(kinds[1]) or path.is_relative_to(kinds[2])
        for node in nodes(path)
        if isinstance(node, ast.Call) and _name(path) not in MAY_READ_THE_CLOCK and _depends_on_speed(node)
    ]
    assert places == []


def _depends_on_speed(call: ast.Call) -> bool:
    """Reading a stopwatch, a limit of its own, and a pause that is to be long enough."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    limits = [value for word in call.keywords if word.arg == "timeout" for value in [word.value]]
    limits += call.args[:1] if name in {"wait", "join", "result"} else []
    has_limit = name != "timeout" and any(isinstance(limit, ast.Constant) and _number(limit) > 1 for limit in limits)
    sleeps = name == "sleep" and isinstance(call.args[0], ast.Constant) and 0.1 <= _number(call.args[0]) < 60
    return name in {"monotonic", "perf_counter"} or has_limit or sleeps


def _number(constant: ast.Constant) -> float:
    return float(constant.value) if isinstance(constant.value, int | float) else 0.0


@pytest.mark.parametrize("word", ["TODO", "FIXME", "XXX"])
def test_no_loose_ends_are_left_in_comments(word: str) -> None:
    assert [_name(path) for path in SOURCES if word in path.read_text(encoding="utf-8")] == []
