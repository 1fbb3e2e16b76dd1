"""Tokens: who gets in, and how they rotate."""

from __future__ import annotations

import os

import pytest

from octavo.engine.errors import InvalidConfigError, UnauthenticatedError
from octavo.server.auth import CHECK_PERIOD_S, TokenFile

OLD, NEW = "old-token-0123456789", "new-token-0123456789"


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def pass_a_period(self) -> None:
        self.now_s += CHECK_PERIOD_S


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "tokens"
    path.write_text(f"# the first client\n{OLD}\n\n  second-token-0123  \n")
    return path


def opens(tokens: TokenFile, header: str | None) -> bool:
    try:
        tokens.check(header)
    except UnauthenticatedError:
        return False
    return True


def test_any_token_of_the_file_opens(path):
    tokens = TokenFile(path)
    assert opens(tokens, f"Bearer {OLD}")
    assert opens(tokens, "bearer second-token-0123")


@pytest.mark.parametrize(
    "header",
    [
        *(None, "", "Bearer", "Bearer ", OLD, f"Basic {OLD}", f"Bearer {OLD}x"),
        *(f"Bearer {OLD[:-1]}", "Bearer # the first client", f"Bearer {OLD.upper()}"),
        *("Bearer \udcff\ud800", "Bearer é"),
    ],
)
def test_anything_else_does_not(path, header):
    assert not opens(TokenFile(path), header)


def test_tokens_rotate_while_the_server_runs(path):
    clock = Clock()
    tokens = TokenFile(path, clock)
    path.write_text(f"{OLD}\n{NEW}\n")
    assert not opens(tokens, f"Bearer {NEW}")
    clock.pass_a_period()
    assert opens(tokens, f"Bearer {NEW}")
    assert opens(tokens, f"Bearer {OLD}")
    path.write_text(NEW)
    clock.pass_a_period()
    assert opens(tokens, f"Bearer {NEW}")
    assert not opens(tokens, f"Bearer {OLD}")


def test_a_file_put_in_the_place_of_another_is_read(path, tmp_path):
    clock = Clock()
    tokens = TokenFile(path, clock)
    other = tmp_path / "other"
    other.write_text(path.read_text().replace(OLD, NEW))
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    other.replace(path)
    clock.pass_a_period()
    assert opens(tokens, f"Bearer {NEW}")


@pytest.mark.parametrize("spoil", ["gone", "empty", "short", "binary"])
def test_a_spoiled_file_leaves_the_last_tokens_good(path, spoil, caplog):
    clock = Clock()
    tokens = TokenFile(path, clock)
    if spoil == "gone":
        path.unlink()
    else:
        path.write_bytes({"empty": b"# none\n", "short": b"abc\n", "binary": b"\xff\xfe"}[spoil])
    clock.pass_a_period()
    assert opens(tokens, f"Bearer {OLD}")
    assert "its last tokens stay good" in caplog.text
    path.write_text(NEW)
    clock.pass_a_period()
    assert opens(tokens, f"Bearer {NEW}")


@pytest.mark.parametrize("content", [None, b"", b"# none\n", b"short\n", b"\xff\xfe\xff\xfe"])
def test_a_server_does_not_start_on_a_file_without_tokens(tmp_path, content):
    path = tmp_path / "tokens"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidConfigError, match="token_file") as caught:
        TokenFile(path)
    assert "short" not in str(caught.value).replace("shorter", "")
