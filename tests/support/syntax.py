"""The syntax of source code: what several rules read is parsed and walked once in a process."""

import ast
from functools import cache


@cache
def parsed(text: str) -> ast.Module:
    """The syntax tree of a module. It is shared: change nothing in it."""
    return ast.parse(text)


@cache
def nodes_of(text: str) -> tuple[ast.AST, ...]:
    """Every node of the tree of a module."""
    return tuple(ast.walk(parsed(text)))
