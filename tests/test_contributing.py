"""CI, hooks and templates agree with the Makefile and pyproject.toml."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
GITHUB = ROOT / ".github"


def make_check_commands() -> list[str]:
    """The commands of `make check`, from the environment that `make venv` builds."""
    makefile = (ROOT / "Makefile").read_text("utf-8")
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert recipe
    return [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe[1].splitlines()]


def test_hooks_run_what_make_check_runs_of_ruff_and_mypy() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))
    [local] = config["repos"]
    assert local["repo"] == "local"
    assert all(hook["language"] == "system" for hook in local["hooks"])
    # A hook that got names of files would check those alone.
    assert not any(hook["pass_filenames"] for hook in local["hooks"])
    wanted = [
        line
        for line in make_check_commands()
        if line.startswith((".venv/bin/ruff", ".venv/bin/mypy"))
    ]
    assert len(wanted) == 3
    assert [hook["entry"] for hook in local["hooks"]] == wanted


def test_ci_installs_the_oldest_and_the_newest_python_and_calls_the_one_script() -> None:
    workflow = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text("utf-8"))
    [job] = workflow["jobs"].values()
    python = next(step for step in job["steps"] if "setup-python" in step.get("uses", ""))
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
        "classifiers"
    ]
    supported = re.findall(r"Python :: (3\.\d+)", "\n".join(classifiers))
    # The last one is `python3`; find_python.sh takes the newest of them.
    assert python["with"]["python-version"].split() == [supported[0], supported[-1]]
    [command] = [step["run"] for step in job["steps"] if "run" in step]
    assert os.access(ROOT / command, os.X_OK)


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_issue_templates_have_the_head_that_makes_them_choosable(name: str) -> None:
    _, head, body = (GITHUB / "ISSUE_TEMPLATE" / f"{name}.md").read_text("utf-8").split("---\n", 2)
    assert {"name", "about"} <= set(yaml.safe_load(head))
    assert body.strip()


def test_a_bug_report_asks_for_version_device_command_and_log() -> None:
    text = (GITHUB / "ISSUE_TEMPLATE" / "bug.md").read_text("utf-8").lower()
    for wanted in ("octavo --version", "jax.devices()", "command", "log"):
        assert wanted in text
