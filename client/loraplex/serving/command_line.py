"""The flags of a settings class as --help shows them: plain types, and defaults as one would write them."""

from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

from pydantic_settings import BaseSettings, CliSettingsSource


def flags(cls: type[BaseSettings], argv: Sequence[str], prog: str) -> CliSettingsSource[Any]:
    """The flags of `argv` as a source of settings. Exits for --help, with status 2 for an unknown flag."""
    shown = {repr(field.default): _written(field.default) for field in cls.model_fields.values()}

    def add_argument(parser: Any, *names: str, **options: Any) -> Any:
        options = options | {"help": _plain_default(options.get("help", ""), shown)}
        if options.get("metavar", "").startswith("tuple["):
            options["metavar"] = "list"
        elif options.get("metavar") == "Path":
            options["metavar"] = "path"
        return parser.add_argument(*names, **options)

    parser = ArgumentParser(prog=prog, description=cls.__doc__, allow_abbrev=False)
    source: CliSettingsSource[Any] = CliSettingsSource(cls, root_parser=parser, add_argument_method=add_argument)
    return source(args=list(argv))


def _plain_default(text: str, shown: dict[str, str]) -> str:
    before, marker, after = text.partition("(default: ")
    default, closing, rest = after.partition(") [env")
    return f"{before}{marker}{shown.get(default, default or 'empty')}{closing}{rest}" if closing else text


def _written(default: object) -> str:
    """As a flag takes it: parts of a list after commas, the sides of a resolution around an x."""
    if default is None or default in ((), ""):
        return "empty"
    if not isinstance(default, tuple):
        return str(default)
    return ",".join("x".join(map(str, part)) if isinstance(part, tuple) else str(part) for part in default)
