"""The documents' links, and the promise that every typed error is explained."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from octavo.engine import errors
from octavo.server.status import reason_of

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
INDEX = ROOT / "docs" / "findings" / "README.md"
DATED = re.compile(r"- \d{4}-\d\d(-\d\d)?\b")


def documents() -> list[Path]:
    try:
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout.split()  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return [ROOT / name for name in listed]


def anchors(path: Path) -> set[str]:
    """As GitHub makes them of headings."""
    found = set()
    for heading in HEADING.findall(path.read_text("utf-8")):
        text = re.sub(r"[^\w\- ]", "", heading.strip().lower())
        found.add(text.replace(" ", "-"))
    return found


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        found = (path.parent / name).resolve() if name else path
        assert found.exists(), f"{path.name} links to {target}"
        if anchor and found.suffix == ".md":
            assert anchor in anchors(found), f"{path.name} links to {target}"


def test_the_link_checker_sees_anchors(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Was `it` so?\n## When a step fails\n")
    assert anchors(page) == {"was-it-so", "when-a-step-fails"}


def findings() -> list[Path]:
    return sorted(set((ROOT / "docs" / "findings").glob("*.md")) - {INDEX})


@pytest.mark.parametrize("path", findings(), ids=lambda path: path.name)
def test_every_page_of_findings_is_in_the_index_and_its_lines_are_dated(path: Path) -> None:
    assert path.name in LINK.findall(INDEX.read_text("utf-8"))
    lines = [line for line in path.read_text("utf-8").splitlines() if line.startswith("- ")]
    undated = [line for line in lines if not DATED.match(line)]
    assert lines
    assert not undated


def all_errors() -> list[type[errors.OctavoError]]:
    found = [errors.OctavoError]
    for kind in found:
        found += kind.__subclasses__()
    return [kind for kind in found if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.__name__)
def test_every_typed_error_has_a_paragraph_with_its_statuses(
    kind: type[errors.OctavoError],
) -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
    _, found, rest = text.partition(f"## `{kind.__name__}`\n")
    assert found, f"{kind.__name__} is not explained"
    paragraph = rest.partition("\n## ")[0]
    assert paragraph.startswith(f"{kind.grpc_status}, {kind.http_status}. ")
    assert len(paragraph) > 150
    assert kind.__name__ in (errors.__doc__ or "")
    assert reason_of(kind)
