"""Commands that the documents show are ones that the program understands."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest

from octavo.server.cli.dataclass_args import given_args
from octavo.server.cli.main import COMMANDS, main
from octavo.server.cli.settings import SECTIONS, read_settings

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "deploy").glob("*.md")])
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands(program: str) -> list[str]:
    """Every whole line that begins with the program, continued lines joined."""
    found = []
    for page in PAGES:
        for language, block in FENCED.findall(page.read_text("utf-8")):
            if language in ("", "sh"):
                lines = block.replace("\\\n", " ").splitlines()
                found += [line for line in lines if line.startswith(program + " ")]
    return found


@pytest.mark.parametrize("line", commands("octavo"))
def test_a_command_of_the_documents_is_understood(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[argparse.Namespace] = []
    for name in COMMANDS:
        module = importlib.import_module(f"octavo.server.cli.{name}")
        monkeypatch.setattr(module, "run", lambda args: seen.append(args))
    _, *argv = shlex.split(line, comments=True)
    if "--help" in argv:
        with pytest.raises(SystemExit, match="0"):
            main(argv)
        return
    assert main(argv) == 0
    [args] = seen
    if argv[0] == "serve":
        given = {k: v for kind in SECTIONS for k, v in given_args(args, kind, "setting_").items()}
        assert read_settings(given, {}, None)  # a value out of range raises


def test_the_documents_show_every_command() -> None:
    shown = {shlex.split(line, comments=True)[1] for line in commands("octavo")}
    assert shown == COMMANDS.keys()


def test_make_targets_of_the_documents_are_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        text = page.read_text("utf-8")
        named = re.findall(r"`make ([a-z-]+)", text)
        named += [shlex.split(line, comments=True)[1] for line in commands("make")]
        assert set(named) <= targets, page.name
