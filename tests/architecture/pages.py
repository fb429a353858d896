"""Pages that are generated from the code.

`python -m tests.architecture.pages` (or `make docs`) writes them; test_pages.py compares them with the code.
"""

import ast
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from ablate.experiments.outcomes import ExitCode
from ablate.service.lifecycle import MOVES, STATE_EVENTS
from tests.architecture import cheats_table
from tests.architecture.gates_page import gates_page
from tests.architecture.recipes_page import recipes_page
from tests.architecture.spec_page import spec_page

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("kernels", "model", "experiments", "service", "workers")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
CODES_START, CODES_END = "<!-- exit codes: written by make docs -->", "<!-- end of exit codes -->"
STATES_START, STATES_END = "<!-- states: written by make docs -->", "<!-- end of states -->"


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a source file's syntax tree."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def settings_page() -> str:
    """Return docs/settings.md: every environment variable, by settings class."""
    parts = [
        "# Settings\n\nThis page lists every environment variable that Ablate reads. Every one has a default that "
        "runs the embedded stack. `make docs` generates the page from `service/settings.py`, "
        "`service/client/settings.py` and `workers/settings.py`.\n"
    ]
    for path, name, who in (
        ("service/settings.py", "ServiceSettings", "API and background process"),
        ("service/client/settings.py", "ClientSettings", "`ablate` and the Python client"),
        ("workers/settings.py", "Settings", "worker"),
    ):
        rows = [
            f"| `ABLATE_{field.upper()}` | `{default}` | {remark} |" for field, default, remark in _fields(path, name)
        ]
        parts.append(f"\n## {who}\n\n| variable | default | remark |\n|---|---|---|\n" + "\n".join(rows) + "\n")
    return "".join(parts)


def errors_page() -> str:
    """Return docs/errors.md: every error class with its meaning."""
    parts = [
        "# Errors\n\nThis page lists every error class with its meaning, which is also the default message. `make "
        "docs` generates it from the `errors.py` of the packages.\n"
    ]
    for path in error_modules():
        rows = [f"| `{name}` | {remark} |" for name, remark in _classes(path)]
        parts.append(f"\n## {path.as_posix()}\n\n| class | meaning |\n|---|---|\n" + "\n".join(rows) + "\n")
    return "".join(parts)


def error_modules() -> list[Path]:
    """Return every errors.py of the packages, relative to the repository."""
    return sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("errors.py"))


def exit_codes() -> str:
    """Return docs/ci.md with a table of exit codes made from the code."""
    rows = "".join(f"| {code.value} | {code.meaning} |\n" for code in ExitCode)
    return _between("docs/ci.md", CODES_START, f"| code | meaning |\n|---|---|\n{rows}", CODES_END)


def state_diagrams() -> str:
    """Return docs/block-life.md with diagrams made from the table of moves."""
    parts = []
    for machine, moves in MOVES.items():
        arrows = [f"    {old} --> {new}" for old, after in moves.items() for new in machine if new in after]
        ends = [f"    {state} --> [*]" for state, after in moves.items() if not after]
        name = STATE_EVENTS[machine].partition(".")[0].capitalize()
        parts.append("\n".join([f"{name}:\n", "```mermaid", "stateDiagram-v2", *arrows, *ends, "```", ""]))
    return _between("docs/block-life.md", STATES_START, "\n" + "\n".join(parts), STATES_END)


def cheats_page() -> str:
    """Return docs/trust.md with the table of cheats."""
    return _between("docs/trust.md", cheats_table.START, cheats_table.cheats_table(), cheats_table.END)


def _between(page: str, start: str, text: str, end: str) -> str:
    """Return a page with `text` between two markers."""
    head, _, rest = (ROOT / page).read_text(encoding="utf-8").partition(start)
    return f"{head}{start}\n{text}{end}{rest.partition(end)[2]}"


PAGES: dict[str, Callable[[], str]] = {
    "docs/gates.md": gates_page,
    "docs/settings.md": settings_page,
    "docs/errors.md": errors_page,
    "docs/ci.md": exit_codes,
    "docs/block-life.md": state_diagrams,
    "docs/spec.md": spec_page,
    "docs/trust.md": cheats_page,
    "docs/recipes.md": recipes_page,
}
"""Generated pages, by path."""


def _class_body(path: str, name: str) -> list[ast.stmt]:
    module = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return next(node.body for node in module.body if isinstance(node, ast.ClassDef) and node.name == name)


def _fields(path: str, name: str) -> Iterator[tuple[str, str, str]]:
    """Yield (field, default, remark); the remark is the string under the field."""
    body = _class_body(path, name)
    for index, node in enumerate(body):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        after = body[index + 1] if index + 1 < len(body) else None
        remark = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
        yield node.target.id, _default(node.value), " ".join(str(remark).split())


def _default(node: ast.expr | None) -> str:
    if isinstance(node, ast.Call):
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        node = given.get("default") or given.get("default_factory") or (node.args[0] if node.args else None)
    return "" if node is None else ast.unparse(node)


def _classes(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and not node.decorator_list:
            yield node.name, " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())


def main() -> None:
    """Write the generated pages whose content changed."""
    for name, made in PAGES.items():
        path, text = ROOT / name, made()
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            sys.stdout.write(f"wrote {name}\n")


if __name__ == "__main__":
    main()
