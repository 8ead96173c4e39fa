"""Prose and code of a source file, apart: docstrings and comments, and the words of names and strings."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator

from tests.support.syntax import nodes_of


def prose_of(text: str) -> Iterator[str]:
    """The docstrings and comments of a module."""
    yield from (str(each.value) for each in docstrings(text))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def docstrings(text: str) -> list[ast.Constant]:
    """Every string that stands alone."""
    lone = [node.value for node in nodes_of(text) if isinstance(node, ast.Expr)]
    return [value for value in lone if isinstance(value, ast.Constant) and isinstance(value.value, str)]


def words_of_code(text: str) -> Iterator[str]:
    """The words of all names and of all strings in the code of a module, without its prose."""
    prose = {id(value) for value in docstrings(text)}
    for node in nodes_of(text):
        texts = [getattr(node, each, None) for each in ("name", "id", "attr", "arg", "asname", "module")]
        if isinstance(node, ast.Constant) and id(node) not in prose:
            texts = [node.value.decode("latin-1") if isinstance(node.value, bytes) else node.value]
        for each in texts:
            if isinstance(each, str):
                yield from re.findall(r"\w+", each)


def words_of_script(text: str) -> list[str]:
    """The words of all names and strings in a Lua script, without its comments."""
    return re.findall(r"\w+", re.sub(r"--.*", "", text))
