"""docs/settings.md, written from the settings themselves.

Run `python -m octavo.server.cli.settings_reference > docs/settings.md` after changing one.
"""

from __future__ import annotations

import dataclasses

from octavo.server.cli.dataclass_args import descriptions_of, is_optional, kind_of
from octavo.server.cli.settings import PREFIX, SECTIONS

_TITLES = {
    "ServeConfig": "Serving",
    "LogConfig": "Logging",
    "EngineConfig": "Engine",
    "HostsConfig": "Several hosts",
}
_KINDS = {int: "integer", float: "number", bool: "true or false", str: "text"}
_HEAD = """# Settings of `octavo serve`

A setting has one name everywhere: `max_num_seqs` in a YAML file (`--config FILE` or
`OCTAVO_CONFIG`), `OCTAVO_MAX_NUM_SEQS` in the environment, `--max-num-seqs` as an option. An option
goes before the environment, the environment before the file, the file before the default. Other
commands that build an engine hear the engine's settings as options and from the environment, too.

This page is generated: `python -m octavo.server.cli.settings_reference > docs/settings.md`.
"""


def render() -> str:
    """The page."""
    lines = [_HEAD]
    for section in SECTIONS:
        lines += [f"## {_TITLES[section.__name__]}", ""]
        lines += ["| setting | environment | value | default | |", "|---|---|---|---|---|"]
        texts = descriptions_of(section)
        for field in dataclasses.fields(section):
            kind = _KINDS[kind_of(section, field.name)]
            kind += " or none" if is_optional(section, field.name) else ""
            default = "none" if field.default is None else f"`{field.default!r}`"
            text = texts[field.name].replace("|", "\\|")
            lines.append(
                f"| `{field.name}` | `{PREFIX}{field.name.upper()}` | {kind} | {default} | {text} |"
            )
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(render(), end="")
