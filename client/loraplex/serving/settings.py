"""Settings of a service: one frozen object, read once; a field is a flag is an environment variable."""

import os
import sys
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, TypeVar

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from loraplex.serving.addresses import check_listen
from loraplex.serving.command_line import flags

Settings = TypeVar("Settings", bound="ServingSettings")

# argparse's exit status for a wrong command line.
EXIT_USAGE = 2


class ServingSettings(BaseSettings):
    """What every service needs; a service subclasses it, sets `env_prefix` and adds its own fields.

    The docstring under a field is its help text.
    """

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        cli_kebab_case=True,
        cli_show_env_vars=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_implicit_flags=True,
    )

    listen: str = "127.0.0.1:0"
    """Address of the gRPC server, host:port; port 0 takes a free one and logs it."""
    metrics_listen: str = "127.0.0.1:0"
    """Address of the Prometheus metrics, host:port; port 0 takes a free one and logs it."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least level that is logged."""
    log_format: Literal["auto", "console", "json"] = "auto"
    """How log lines look; auto is console on a terminal and JSON elsewhere."""
    drain_timeout_s: float = Field(30.0, ge=0, allow_inf_nan=False)
    """After SIGTERM running calls may go on for this many seconds."""

    @field_validator("listen")
    @classmethod
    def _check_listen(cls, address: str) -> str:
        return check_listen(address, unix=True)

    @field_validator("metrics_listen")
    @classmethod
    def _check_metrics_listen(cls, address: str) -> str:
        return check_listen(address)


def load_settings(cls: type[Settings], argv: Sequence[str], prog: str) -> Settings:
    """The settings from flags, else environment, else defaults. --help prints all three of every field and exits.

    A wrong value names its field, flag and variable on stderr; that and an unknown flag exit with status 2.
    """
    try:
        command_line: dict[str, Any] = {"_cli_settings_source": flags(cls, argv, prog)}
        return cls(**command_line)
    except ValidationError as error:
        _refuse(prog, [_explained(cls, wrong["loc"], wrong["msg"], argv) for wrong in error.errors()])
    except SettingsError as error:
        _refuse(prog, [f"{error}; {error.__cause__ or 'unreadable'}"])


def _explained(cls: type[ServingSettings], loc: tuple[int | str, ...], message: str, argv: Sequence[str]) -> str:
    field, message = str(loc[0]) if loc else "", message.removeprefix("Value error, ")
    if field not in cls.model_fields:
        return f"{field}: {message}".removeprefix(": ")
    flag = "--" + field.replace("_", "-")
    variable = (str(cls.model_config.get("env_prefix", "")) + field).upper()
    if any(word == flag or word.startswith(f"{flag}=") for word in argv):
        return f"{flag}: {message}"
    if variable in {name.upper() for name in os.environ}:
        return f"{variable}: {message}"
    return f"{field} (flag {flag}, environment variable {variable}): {message}"


def _refuse(prog: str, complaints: list[str]) -> NoReturn:
    for complaint in complaints:
        sys.stderr.write(f"{prog}: {complaint}\n")
    sys.stderr.write(f"{prog}: see --help\n")
    raise SystemExit(EXIT_USAGE)
