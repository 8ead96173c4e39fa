"""The syntax of source code: what several rules read is parsed and walked once in a process."""

import ast
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache


@cache
def parsed(text: str) -> ast.Module:
    """The syntax tree of a module. It is shared: change nothing in it."""
    with _no_collections():
        return ast.parse(text)


@cache
def nodes_of(text: str) -> tuple[ast.AST, ...]:
    """Every node of the tree of a module."""
    tree = parsed(text)
    with _no_collections():
        return tuple(ast.walk(tree))


@contextmanager
def _no_collections() -> Iterator[None]:
    """The million nodes of our code all stay: collecting garbage among them takes twice as long as parsing it.

    So they are frozen; the garbage of earlier tests is collected before.
    """
    _collect_once()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@cache
def _collect_once() -> None:
    gc.collect()
