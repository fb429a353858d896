import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import kernels
from experiments.outcomes import ExitCode
from experiments.records.plan_file import plan_file_text
from service.cli import commands
from tests.architecture.pages import ROOT
from tests.bundles import make_file


def test_import_contracts_hold() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_kernels_is_ours_and_not_the_package_of_that_name() -> None:
    assert Path(kernels.__file__ or "").is_relative_to(ROOT)


@pytest.mark.parametrize("module", ["service.app", "service.background.main", "experiments.runtime.console"])
def test_program_starts_without_heavy_packages(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'jax', 'tilelang', 'mlflow'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("module", ["experiments.design.plan", "workers.offline.cli", "workers.serve"])
def test_what_a_node_imports_needs_no_scipy(module: str) -> None:
    code = f"import sys; sys.modules['scipy'] = None; import {module}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)


def test_plan_file_is_read_and_compared_without_scipy() -> None:
    code = (
        "import sys\n"
        "sys.modules['scipy'] = None\n"
        "from experiments.records.plan_file import differences, read_plan_file\n"
        "print(differences(read_plan_file(sys.stdin.buffer.read())))\n"
    )
    command = [sys.executable, "-c", code]
    text = plan_file_text(make_file())
    done = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


HEAVY = ("torch", "jax", "tilelang", "mlflow", "matplotlib", "ruptures", "sqlalchemy", "fastapi", "scipy", "numpy")
SETTINGS = "pydantic_settings"
UNUSED = (*HEAVY, SETTINGS, "yaml", "experiments.design.spec", "experiments.analysis", "service.cli.commands.show")
"""What a command does not use that asks the service and shows a table."""
MOST_MODULES = 480
"""A few more than Python, Typer, pydantic, httpx, rich and the command take; 571 took 0.44 s of a quiet processor."""


@pytest.mark.parametrize(
    ("words", "unused"),
    [
        (["--version"], (*UNUSED, "pydantic", "httpx", "rich")),
        (["list", "--help"], UNUSED),
        (["show", "--help"], (*UNUSED[:-1], "service.cli.commands.list")),
        (["nodes", "--help"], UNUSED),
        (["watch", "--help"], UNUSED),
        (["verdict", "--help"], (*HEAVY, SETTINGS, "yaml", "experiments.design.spec", "experiments.records.receipts")),
        (["report", "--help"], UNUSED),
        (["plan", "--help"], UNUSED),
        (["history", "--help"], (*HEAVY, SETTINGS, "yaml", "experiments.records.receipts")),
        (["status", "--help"], (*HEAVY, "experiments.design.spec")),
        (["worker", "--help"], ("service.cli.service_commands", "sqlalchemy", "fastapi")),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_command_starts_without_what_it_does_not_use(words: list[str], unused: tuple[str, ...]) -> None:
    code = (
        "import sys\n"
        f"sys.argv[1:] = {words!r}\n"
        "from experiments.runtime.console import main\n"
        "try:\n    main()\n"
        f"finally:\n    print(sorted({set(unused)!r} & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


LOCAL = {"assess", "exec_", "mlflow"}
"""Commands that judge, run or read the database themselves."""


def test_no_command_that_asks_the_service_imports_what_judges_or_serves() -> None:
    names = sorted(found.name for found in pkgutil.iter_modules(commands.__path__) if found.name not in LOCAL)
    assert len(names) > 20
    code = (
        "import sys\nfrom importlib import import_module\n"
        f"for name in {names!r}:\n    import_module('service.cli.commands.' + name)\n"
        f"print(sorted({{*{HEAVY!r}, {SETTINGS!r}}} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("words", [["list"], ["verdict", "latest"], ["plan", "demo"]], ids=lambda words: words[0])
def test_asking_a_service_takes_few_modules(words: list[str]) -> None:
    """Not to reach one is an answer too; what it took until then is what every command takes."""
    code = (
        "import sys\n"
        f"sys.argv[1:] = {words!r}\n"
        "from experiments.runtime.console import main\n"
        "try:\n    main()\n"
        f"finally:\n    print(len(sys.modules), sorted({{*{HEAVY!r}, {SETTINGS!r}}} & set(sys.modules)))\n"
    )
    address = {"ABLATE_URL": "http://127.0.0.1:9", "ABLATE_TOKEN": "nobody-listens-there"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=address, capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.ERROR, done.stderr
    assert "nothing listens there" in done.stderr
    count, heavy = done.stdout.split(maxsplit=1)
    assert heavy.strip() == "[]"
    assert int(count) < MOST_MODULES


def test_help_needs_no_package_of_a_server_and_names_what_is_missing() -> None:
    code = (
        "import sys\n"
        "absent = ['torch', 'jax', 'tilelang', 'mlflow', 'sqlalchemy', 'fastapi', 'scipy']\n"
        "sys.modules.update(dict.fromkeys(absent))\n"
        "sys.argv[1:] = ['--help']\n"
        "from experiments.runtime.console import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {"submit", "worker", "exec", "demo"} <= set(done.stdout.split())
    assert "'scipy' is not installed" in " ".join(done.stdout.replace("\N{BOX DRAWINGS LIGHT VERTICAL}", " ").split())
