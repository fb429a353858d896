"""A printed TileLang program as code that the interpreter executes; see tile_interpreter.py."""

import ast
from functools import lru_cache
from typing import Any

BLOCKING = {"mbarrier_wait_parity", "tvm_storage_sync"}
"""Calls in which a thread waits for others: a branch with one is a role of its own."""


class _Rewrite(ast.NodeTransformer):
    """Turn what Python would decide at once (if, and, or, not, lazily taken values) into calls of the machine."""

    def visit_Call(self, node: ast.Call) -> Any:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name in {"region", "access_ptr"}:
            buffer, *rest = node.args
            assert isinstance(buffer, ast.Subscript)
            index = buffer.slice if isinstance(buffer.slice, ast.Tuple) else ast.Tuple([buffer.slice], ast.Load())
            node.args = [buffer.value, index, *rest]
        self.generic_visit(node)
        if name == "if_then_else":
            condition, yes, no = node.args
            nothing = ast.arguments([], [], None, [], [], None, [])
            return _call("choose", condition, ast.Lambda(nothing, yes), ast.Lambda(nothing, no))
        if isinstance(node.func, ast.Name) and node.func.id == "range":
            return _call("serial", *node.args)
        return node

    def visit_Assign(self, node: ast.Assign) -> Any:
        (target,), value = node.targets, node.value
        added = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add)
        if isinstance(target, ast.Subscript) and added and ast.unparse(value.left) == ast.unparse(target):
            addition = ast.Attribute(target.value, "add", ast.Load())
            return ast.Expr(ast.Call(addition, [self.visit(target.slice), self.visit(value.right)], []))
        return self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        self.generic_visit(node)
        operator = ast.BitAnd() if isinstance(node.op, ast.And) else ast.BitOr()
        joined = node.values[0]
        for value in node.values[1:]:
            joined = ast.BinOp(joined, operator, value)
        return joined

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not):
            return ast.BinOp(ast.Constant(value=True), ast.BitXor(), node.operand)
        return node

    def visit_If(self, node: ast.If) -> Any:
        waits = any(isinstance(n, ast.Attribute) and n.attr in BLOCKING for n in ast.walk(node))
        self.generic_visit(node)
        if waits:
            nothing = ast.arguments([], [], None, [], [], None, [])
            branches = [
                ast.FunctionDef(name, nothing, body or [ast.Pass()], [])
                for name, body in (("yes", node.body), ("no", node.orelse))
            ]
            names = [ast.Name(branch.name, ast.Load()) for branch in branches]
            return [*branches, ast.Expr(_call("roles", node.test, *names))]
        which = ast.If(ast.Name("holds", ast.Load()), node.body, node.orelse)
        return ast.For(ast.Name("holds", ast.Store()), _call("branches", node.test), [which], [])


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Attribute(ast.Name("T", ast.Load()), name, ast.Load()), list(arguments), [])


@lru_cache(maxsize=64)
def executable(text: str) -> Any:
    """Return the code of a program's text, its control flow and its marks handed to `T`."""
    tree = ast.fix_missing_locations(_Rewrite().visit(ast.parse(text)))
    return compile(tree, "<tile program>", "exec")
