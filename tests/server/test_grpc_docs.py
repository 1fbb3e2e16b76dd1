"""docs/grpc.md says what the protos say, and its example runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples import examples

PAGE = Path(__file__).parents[2] / "docs" / "grpc.md"


def test_the_page_is_current():
    pytest.importorskip("grpc_tools")
    from octavo.server.proto.reference import render

    assert PAGE.read_text() == render()


def test_every_link_inside_the_page_leads_somewhere():
    text = PAGE.read_text()
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    assert len(titles) == len(set(titles))
    anchors = {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}
    links = set(re.findall(r"\]\(#([^)]+)\)", text))
    assert len(links) > 20
    assert links <= anchors


def test_the_example_runs(live, capsys):
    [code] = examples("grpc.md")
    exec(code.replace("127.0.0.1:50051", live.grpc), {})
    whole, streamed = capsys.readouterr().out.split("\n", 1)
    assert whole == streamed
