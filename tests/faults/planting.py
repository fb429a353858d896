"""Faults for the product: every place where one can be planted, and the changed source."""

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("kernels", "model", "experiments", "service", "workers")
_COMPARE: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
_ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
}
_LARGEST = 4
"""A larger number is a limit or a size that somebody chose: one more of it is no fault."""
_SAYS_ONLY = {"log", "logging", "logger", "progress", "console"}
"""Calls of these names change what people read, not what the program does."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One change of one expression or statement."""

    file: str
    line: int
    start: int
    """Offset of the replaced text, in bytes."""
    end: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before} -> {self.after}"

    def plant(self, root: Path) -> None:
        """Write the changed file below `root`."""
        path = root / self.file
        text = path.read_bytes()
        path.write_bytes(text[: self.start] + self.after.encode() + text[self.end :])


def drawn(root: Path, *, count: int, seed: int) -> list[Fault]:
    """Return `count` faults at places drawn from the whole product, each place as likely as another."""
    places = [
        fault for path in _sources(root) for fault in _faults(path.relative_to(root).as_posix(), path.read_text())
    ]
    return random.Random(seed).sample(places, count)  # noqa: S311 - a reproducible draw


def _sources(root: Path) -> list[Path]:
    paths = sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))
    return [path for path in paths if "migrations" not in path.parts]


def _faults(file: str, text: str) -> Iterator[Fault]:
    starts = _line_starts(text)
    for node in _behaviour(ast.parse(text)):
        after = _changed(node, text)
        if after is None:
            continue
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        yield Fault(
            file=file, line=node.lineno, start=start, end=end, before=" ".join(ast.unparse(node).split()), after=after
        )


def _line_starts(text: str) -> list[int]:
    starts = [0]
    for line in text.encode().split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    return starts


def _behaviour(node: ast.AST, inside: bool = False) -> Iterator[ast.expr | ast.stmt]:
    """Yield the expressions and statements of functions, without annotations, messages and log lines."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Raise | ast.Assert | ast.JoinedStr | ast.arguments) or _only_says(child):
            continue
        if inside and isinstance(child, ast.expr | ast.stmt):
            yield child
        yield from _behaviour(child, inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))


def _only_says(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return False
    names = {part.id for part in ast.walk(node.value.func) if isinstance(part, ast.Name)}
    return bool(names & _SAYS_ONLY)


def _changed(node: ast.expr | ast.stmt, text: str) -> str | None:  # noqa: PLR0911 - a table of kinds
    """Return the changed source of a node; None where this program has no fault for it."""
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in _COMPARE:
            return f"({_source(left, text)} {_COMPARE[type(operator)]} {_source(right, text)})"
        case ast.BoolOp(op=operator, values=values):
            word = " or " if isinstance(operator, ast.And) else " and "
            return f"({word.join(_source(value, text) for value in values)})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return f"bool({_source(operand, text)})"
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _ARITHMETIC and not _of_text(node):
            return f"({_source(left, text)} {_ARITHMETIC[type(operator)]} {_source(right, text)})"
        case ast.Constant(value=int(value)) if not isinstance(value, bool) and abs(value) <= _LARGEST:
            return repr(value + 1)
        case ast.Expr(value=ast.Call()):
            return "pass"
    return None


def _of_text(node: ast.BinOp) -> bool:
    texts = (part for part in ast.walk(node) if isinstance(part, ast.JoinedStr | ast.Constant))
    return any(isinstance(part, ast.JoinedStr) or isinstance(part.value, str) for part in texts)


def _source(node: ast.expr, text: str) -> str:
    return f"({ast.get_source_segment(text, node)})"
