"""What stands in deploy/ agrees with the server: flags, paths, metrics, times."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.server.cli.dataclass_args import add_dataclass_args
from octavo.server.cli.settings import SECTIONS
from octavo.server.serve_config import ServeConfig
from tests.scripts import load_script

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DOCKERFILES = sorted(DEPLOY.glob("Dockerfile.*"))


@pytest.fixture(scope="module")
def options() -> set[str]:
    import argparse

    parser = argparse.ArgumentParser()
    for section in SECTIONS:
        add_dataclass_args(parser.add_argument_group(section.__name__), section, prefix="x_")
    known = {name for action in parser._actions for name in action.option_strings}
    return known | {"--config", "--record", "--quiet"}


def flags(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("--")}


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_serves_with_flags_that_exist(path: Path, options: set[str]) -> None:
    text = path.read_text()
    command = json.loads(text.rpartition("ENTRYPOINT ")[2])
    assert command[:2] == ["octavo", "serve"]
    assert flags(command) <= options
    assert "USER octavo" in text
    assert command[command.index("--http-port") + 1] in text.partition("EXPOSE")[2]


def test_the_images_health_check_passes_on_a_ready_server_alone(live) -> None:
    (check,) = {
        path.read_text().partition("HEALTHCHECK ")[2].split("\n")[0] for path in DOCKERFILES
    }
    command = json.loads(check.partition("CMD ")[2])
    address = live.http.removeprefix("http://")
    for target, status in ((address, 0), ("127.0.0.1:1", 1)):
        code = command[2].replace("127.0.0.1:8000", target)
        assert code != command[2]
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
        assert done.returncode == status, done.stderr


def test_there_is_an_image_for_each_target() -> None:
    assert [path.suffix for path in DOCKERFILES] == [".cpu", ".cuda", ".tpu"]
    extras = [re.search(r"\[([a-z,]+)\]", path.read_text()) for path in DOCKERFILES]
    assert [found and found[1] for found in extras] == [
        "http,otel", "http,otel,cuda", "http,otel,tpu",
    ]  # fmt: skip


def test_the_unit_waits_longer_than_the_server_drains(options: set[str]) -> None:
    text = (DEPLOY / "octavo.service").read_text()
    fields = dict(re.findall(r"^(\w+)=(.+)$", text, re.MULTILINE))
    command = shlex.split(fields["ExecStart"])
    assert flags(command) <= options
    assert float(fields["TimeoutStopSec"]) > ServeConfig().drain_timeout_s


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    verify = shutil.which("systemd-analyze")
    if verify is None:
        pytest.skip("systemd is not installed")
    unit = tmp_path / "octavo.service"
    # What is not installed here would be a complaint of its own.
    text = (DEPLOY / "octavo.service").read_text()
    text = text.replace("/opt/octavo/bin/octavo", "/bin/true").replace("User=octavo", "User=root")
    unit.write_text(text.replace("Group=octavo", "Group=root"))
    done = subprocess.run([verify, "verify", str(unit)], capture_output=True, text=True)
    assert "octavo.service" not in done.stderr, done.stderr


def test_the_dashboard_is_what_its_script_writes() -> None:
    dashboard = load_script(DEPLOY / "make_dashboard.py").dashboard()
    assert json.loads((DEPLOY / "grafana.json").read_text()) == dashboard


def test_the_dashboard_asks_for_metrics_that_the_server_has(live) -> None:
    import urllib.request

    with urllib.request.urlopen(f"{live.http}/metrics") as answer:
        page = answer.read().decode()
    served = set(re.findall(r"^(octavo:\w+)", page, re.MULTILINE))
    # Families without a sample yet are known by their type alone.
    served |= {f"{name}_total" for name in re.findall(r"# TYPE (octavo:\w+) counter", page)}
    served |= set(re.findall(r"# TYPE (octavo:\w+) counter", page))
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            asked = set(re.findall(r"octavo:\w+", target["expr"]))
            assert asked
            assert asked <= served, f"{panel['title']}: {asked - served}"
