"""Command schemas: the arguments of a command as JSON, by a JSON schema, for callers that are programs."""

from collections.abc import Collection, Mapping
from typing import Any

from millstream.cli.main import load_command
from millstream.errors import ConfigError

_JSON_TYPES = {"string": str, "integer": int, "boolean": bool, "array": list}


class CommandSchema:
    """A command, the JSON schema of its arguments and options, and the command line for an object of this schema.

    `words` name the command, such as `key list`. The schema has its parameters but those that `hidden` names.
    """

    def __init__(self, words: str, *, hidden: Collection[str] = ()) -> None:
        family, *rest = words.split()
        loaded = load_command(family)
        self.command = loaded.commands[rest[0]] if rest else loaded
        named = [(one.opts[0].removeprefix("--").replace("-", "_"), one) for one in self.command.params]
        self._parameters = {name: one for name, one in named if one.name not in hidden}

    def describe(self) -> dict[str, Any]:
        """The schema: an object with a property for each parameter, and no other."""
        return {
            "type": "object",
            "properties": {name: _describe(one) for name, one in self._parameters.items()},
            "required": [name for name, one in self._parameters.items() if one.required],
            "additionalProperties": False,
        }

    def argv(self, arguments: Mapping[str, Any]) -> list[str]:
        """Arguments as words of a command line. A value is never read as an option. Raises ConfigError for wrong ones.

        What the command itself refuses is left to it: a missing argument, a number out of its range.
        """
        if unknown := [one for one in arguments if one not in self._parameters]:
            raise ConfigError(f"there is no argument {unknown[0]!r}; use {', '.join(self._parameters)}")
        options, positions = list[str](), list[str]()
        for name, parameter in self._parameters.items():
            if name not in arguments:
                continue
            value, wanted = arguments[name], _describe(parameter)["type"]
            if type(value) is not _JSON_TYPES[wanted]:
                raise ConfigError(f"{name}: {value!r} is not of the type {wanted}")
            if parameter.param_type_name == "argument":
                positions += [str(one) for one in (value if isinstance(value, list) else [value])]
            elif value is not False:
                options.append(parameter.opts[0] if value is True else f"{parameter.opts[0]}={value}")
        return [*options, "--", *positions]


def _describe(parameter: Any) -> dict[str, Any]:
    kind = parameter.type
    word = kind.name.partition(" ")[0]  # versions of Typer write `int` or `integer`, `bool` or `boolean`
    found: dict[str, Any] = {"type": next((one for one in ("integer", "boolean") if one.startswith(word)), "string")}
    found |= {"enum": [*kind.choices]} if hasattr(kind, "choices") else {}
    found |= {"minimum": kind.min} if getattr(kind, "min", None) is not None else {}
    found = {"type": "array", "items": found} if parameter.nargs == -1 else found
    return found | {"description": parameter.help or parameter.metavar}
