"""What commands a module declares, read from its text: a list of commands needs nothing of what they import."""

import ast
import inspect
from importlib.util import find_spec
from pathlib import Path

from typer.core import TyperCommand


def outlines(module: str) -> dict[str, TyperCommand]:
    """Return by name what help lists of a module's commands, without importing it; none where it has no file."""
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:  # the package that it would be in
        spec = None
    if spec is None or spec.origin is None:
        return {}
    found = _declared(ast.parse(Path(spec.origin).read_text(encoding="utf-8")))
    return {name: TyperCommand(name, help=inspect.cleandoc(text)) for name, text in found.items()}


def _declared(tree: ast.Module) -> dict[str, str]:
    """Return the help of a group that names itself, else of every command, by name."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _is(node.targets[0], "app"):
            given = _texts(node.value)
            if "name" in given:
                return {given["name"]: given.get("help", "")}
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return dict(one for function in functions for one in _commands(function))


def _commands(function: ast.FunctionDef) -> list[tuple[str, str]]:
    help_text = ast.get_docstring(function) or ""
    calls = [node for node in function.decorator_list if isinstance(node, ast.Call)]
    own = [call for call in calls if isinstance(call.func, ast.Attribute) and _is(call.func.value, "app")]
    named = [_texts(call) for call in own if isinstance(call.func, ast.Attribute) and call.func.attr == "command"]
    name = function.name.rstrip("_").replace("_", "-")
    return [(given.get("name", name), given.get("help", help_text)) for given in named]


def _is(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _texts(call: ast.Call) -> dict[str, str]:
    """Return the arguments that are text; a command's first is its name."""
    given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    if call.args:
        given["name"] = call.args[0]
    constants = {name: value.value for name, value in given.items() if isinstance(value, ast.Constant)}
    return {name: value for name, value in constants.items() if isinstance(value, str)}
