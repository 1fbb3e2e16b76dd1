"""The server's settings from a file, the environment and options, in that order of rising weight.

A setting has one name everywhere: `max_num_seqs` in the file, OCTAVO_MAX_NUM_SEQS in the
environment, `--max-num-seqs` as an option.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.engine.config import EngineConfig
from octavo.engine.errors import InvalidConfigError
from octavo.engine.hosts.hosts_config import HostsConfig
from octavo.server.cli.dataclass_args import is_optional, kind_of
from octavo.server.cli.suggesting_parser import suggestion
from octavo.server.cli.vllm_options import NAMES, RENAMED, check_vllm_settings
from octavo.server.logs import LogConfig
from octavo.server.serve_config import ServeConfig

SECTIONS: tuple[type, ...] = (ServeConfig, LogConfig, EngineConfig, HostsConfig)
PREFIX = "OCTAVO_"

_JSON = ("allowed_origins", "allowed_methods", "allowed_headers", "override_generation_config")
"""Settings whose text is JSON, which a file may hold as it is."""
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All of a server's settings.

    Attributes:
        serve, log, engine, hosts: by what they are for.
    """

    serve: ServeConfig
    log: LogConfig
    engine: EngineConfig
    hosts: HostsConfig


def setting_kinds() -> dict[str, type]:
    """Setting -> the dataclass it belongs to."""
    return {field.name: kind for kind in SECTIONS for field in dataclasses.fields(kind)}


def read_settings(
    options: Mapping[str, Any], environ: Mapping[str, str], file: str | None
) -> Settings:
    """Puts settings together.

    Args:
        options: those given as options, by name.
        environ: the process's environment.
        file: path of a YAML file, or None.

    Raises:
        InvalidConfigError: an unknown setting in the file, or a value that cannot work.
    """
    kinds = setting_kinds()
    values = ({} if file is None else _read_file(file, kinds)) | read_environment(environ, kinds)
    values |= options
    made = [
        kind(**{name: value for name, value in values.items() if kinds[name] is kind})
        for kind in SECTIONS
    ]
    serve, log, engine, hosts = made
    return Settings(serve=serve, log=log, engine=engine, hosts=hosts)


def _read_file(path: str, kinds: Mapping[str, type]) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(Path(path).expanduser().read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidConfigError("config", path, f"a readable YAML file ({error})") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InvalidConfigError("config", path, "a YAML mapping of settings to values")
    values = {}
    others: dict[str, object] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        name = RENAMED.get(name, name)
        if name in NAMES:
            others[name] = value
            continue
        if name not in kinds:
            near = suggestion(name, kinds) or "; `octavo serve --help` lists them"
            raise InvalidConfigError(str(key), value, f"the name of a setting{near}")
        values[name] = _typed(kinds[name], name, value)
    check_vllm_settings(others)
    return values


def read_environment(environ: Mapping[str, str], kinds: Mapping[str, type]) -> dict[str, Any]:
    """The settings that stand in the environment.

    Args:
        environ: the process's environment.
        kinds: setting -> the dataclass it belongs to.

    Raises:
        InvalidConfigError: a variable's text is no value of its setting.
    """
    return {
        name: _parse(kind, name, environ[PREFIX + name.upper()])
        for name, kind in kinds.items()
        if PREFIX + name.upper() in environ
    }


def _typed(kind: type, name: str, value: object) -> object:
    """A value as YAML read it, checked."""
    wanted = kind_of(kind, name)
    if value is None and is_optional(kind, name):
        return None
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if name in _JSON and isinstance(value, list | dict):
        return json.dumps(value)
    if type(value) is not wanted:
        raise InvalidConfigError(name, value, _name_of(wanted))
    return value


def _parse(kind: type, name: str, text: str) -> object:
    """A value from a variable's text."""
    wanted = kind_of(kind, name)
    if is_optional(kind, name) and text.lower() in ("", "none"):
        return None
    if wanted is bool:
        if text.lower() not in (*_TRUE, *_FALSE):
            raise InvalidConfigError(PREFIX + name.upper(), text, "true or false")
        return text.lower() in _TRUE
    try:
        return wanted(text)
    except ValueError:
        raise InvalidConfigError(PREFIX + name.upper(), text, _name_of(wanted)) from None


def _name_of(kind: type) -> str:
    return {int: "an integer", float: "a number", bool: "true or false", str: "text"}[kind]
