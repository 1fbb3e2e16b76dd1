"""Events of streams are lines for every reader."""

from __future__ import annotations

import json

import pytest

from octavo.server.http.streaming import event, named_event


@pytest.mark.parametrize("char", "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029é🙂\\")
def test_no_text_breaks_an_event_s_line(char):
    content = {"type": "t", "text": f"a{char}{char}b"}
    for made in (event(content), named_event(content)):
        text = made.decode()
        assert text.endswith("\n\n")
        lines = text.splitlines()
        assert len([line for line in lines if line]) == text.count("\n") - 1
        assert json.loads(lines[-2].removeprefix("data: ")) == content
