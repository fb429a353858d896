import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

from ablate.experiments.outcomes import ExitCode
from ablate.experiments.records.plan_file import plan_file_text
from ablate.service.cli import commands
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


def _python(code: str, *, text: str | None = None) -> str:
    """Run code in a fresh interpreter and return its output."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_programs_start_without_heavy_packages() -> None:
    code = (
        "import sys\n"
        "import ablate.experiments.system.console, ablate.service.app, ablate.service.background.main\n"
        "print(sorted({'torch', 'jax', 'tilelang', 'mlflow'} & set(sys.modules)))"
    )
    assert _python(code) == "[]"


def test_node_needs_no_scipy_nor_does_reading_a_plan_file() -> None:
    code = (
        "import sys\n"
        "sys.modules['scipy'] = None\n"
        "from ablate.experiments.records.plan_file import differences, read_plan_file\n"
        "import ablate.experiments.design.plan, ablate.workers.offline.cli, ablate.workers.serve\n"
        "print(differences(read_plan_file(sys.stdin.buffer.read())))\n"
    )
    assert _python(code, text=plan_file_text(make_file())) == "[]"


HEAVY = ("torch", "jax", "tilelang", "mlflow", "matplotlib", "ruptures", "sqlalchemy", "fastapi", "scipy", "numpy")
SETTINGS = "pydantic_settings"
SPEC, RECEIPTS = "ablate.experiments.design.spec", "ablate.experiments.records.receipts"
UNUSED = (
    *HEAVY,
    SETTINGS,
    "yaml",
    "ablate.experiments.design.spec",
    "ablate.experiments.analysis",
    "ablate.service.cli.commands.show",
)
"""What a command does not use that asks the service and shows a table."""
MOST_MODULES = 483
"""A few more than Python, Typer, pydantic, httpx, rich and the command take; 571 took 0.44 s of a quiet processor."""


STARTS = [
    ("--version", (*UNUSED, "pydantic", "httpx", "rich")),
    *((f"{command} --help", UNUSED) for command in ("list", "nodes", "watch", "report", "plan")),
    ("show --help", UNUSED[:-1]),
    ("history --help", (*HEAVY, SETTINGS, "yaml", RECEIPTS)),
    ("verdict --help", (*HEAVY, SETTINGS, "yaml", SPEC, RECEIPTS)),
    ("status --help", (*HEAVY, SPEC)),
]
"""Commands of the service in an order in which no earlier one may import what a later one must not."""
WORKER_STARTS = [("worker --help", ("ablate.service.cli.service_commands", "sqlalchemy", "fastapi"))]


@pytest.mark.parametrize("starts", [STARTS, WORKER_STARTS], ids=["service", "worker"])
def test_a_command_starts_without_what_it_does_not_use(starts: list[tuple[str, tuple[str, ...]]]) -> None:
    """Run the commands one after another in one process, so modules accumulate."""
    code = (
        "import sys\n"
        "from ablate.experiments.system.console import main\n"
        f"for words, unused in {starts!r}:\n"
        "    sys.argv[1:] = words.split()\n"
        "    try:\n        main()\n"
        "    except SystemExit as error:\n        assert not error.code, words\n"
        "    else:\n        raise AssertionError(words)\n"
        "    loaded = sorted(set(unused) & set(sys.modules))\n"
        "    assert not loaded, (words, loaded)\n"
    )
    _python(code)


LOCAL = {"admin.backup", "admin.mlflow", "admin.restore", "offline.assess"}
"""Commands that judge, or read the database themselves."""


def test_no_command_that_asks_the_service_imports_what_judges_or_serves() -> None:
    prefix = f"{commands.__name__}."
    modules = [module.name.removeprefix(prefix) for module in pkgutil.walk_packages(commands.__path__, prefix)]
    names = sorted(set(modules) - LOCAL)
    assert len(names) > 20
    code = (
        "import sys\nfrom importlib import import_module\n"
        f"for name in {names!r}:\n    import_module('ablate.service.cli.commands.' + name)\n"
        f"print(sorted({{*{HEAVY!r}, {SETTINGS!r}}} & set(sys.modules)))\n"
    )
    assert _python(code) == "[]"


@pytest.mark.parametrize("words", [["list"], ["verdict", "latest"], ["plan", "demo"]], ids=lambda words: words[0])
def test_asking_a_service_takes_few_modules(words: list[str]) -> None:
    """Every command takes the modules that one needs until it finds that nothing listens."""
    code = (
        "import sys\n"
        f"sys.argv[1:] = {words!r}\n"
        "from ablate.experiments.system.console import main\n"
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
        "from ablate.experiments.system.console import main\n"
        "for words in ([], ['offline']):\n"
        "    sys.argv[1:] = [*words, '--help']\n"
        "    try:\n        main()\n"
        "    except SystemExit:\n        pass\n"
    )
    help_text = _python(code).replace("\N{BOX DRAWINGS LIGHT VERTICAL}", " ").split()
    assert {"ask", "worker", "check", "exec", "demo"} <= set(help_text)
    assert "'scipy' is not installed" in " ".join(help_text)
