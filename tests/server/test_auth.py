"""Tokens: who gets in, and how they rotate."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.errors import InvalidConfigError, InvalidRequestError, UnauthenticatedError
from octavo.server.auth import CHECK_PERIOD_S, TokenFile
from octavo.server.caller import Caller

OLD, NEW, LONE = [f"{name}-token-0123456789" for name in ("old", "new", "lone")]


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


def caller(tokens: TokenFile, token: str) -> Caller:
    return tokens.check(f"Bearer {token}")


def test_a_line_may_name_its_tokens_tenant(tmp_path):
    path = tmp_path / "tokens"
    lines = [f"acme:{OLD}", f" acme : {NEW} ", "beta:token:with:colons", ":plain:with:colons", LONE]
    path.write_text("\n".join(lines))
    tokens = TokenFile(path)
    old, new, beta = [caller(tokens, token) for token in (OLD, NEW, "token:with:colons")]
    assert (old.tenant, new.tenant, beta.tenant) == ("acme", "acme", "beta")
    assert old.owner == new.owner != beta.owner
    plain, lone = caller(tokens, "plain:with:colons"), caller(tokens, LONE)
    assert plain.tenant is lone.tenant is None
    assert len({old.owner, beta.owner, plain.owner, lone.owner}) == 4
    for token in ("", "acme", f"acme:{OLD}", f":{LONE}", ":plain:with:colons", "colons"):
        assert not opens(tokens, f"Bearer {token}")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (f"acme:{OLD}\n# a comment\nbeta:{OLD}\n", "lines 1 and 3"),
        (f"acme:{OLD}\n{OLD}\n", "lines 1 and 2"),
        (f"{OLD}\nacme:{OLD}\n", "lines 1 and 2"),
        ("acme:short\n", "line 1"),
        (f"{OLD}\nacme:\n", "line 2"),
        (f"{'a' * 300}:{OLD}\n", "line 1"),
        (f"a\x00b:{OLD}\n", "line 1"),
    ],
)
def test_a_line_that_cannot_be_is_named_and_its_token_is_not(tmp_path, content, line):
    path = tmp_path / "tokens"
    path.write_text(content)
    with pytest.raises(InvalidConfigError, match=line) as caught:
        TokenFile(path)
    assert OLD not in str(caught.value)


def test_a_token_may_stand_twice_under_one_tenant(tmp_path):
    path = tmp_path / "tokens"
    path.write_text(f"acme:{OLD}\nacme: {OLD}\n")
    assert caller(TokenFile(path), OLD).tenant == "acme"


def test_a_spoiled_tenant_leaves_the_last_tokens_good(tmp_path, caplog):
    clock, path = Clock(), tmp_path / "tokens"
    path.write_text(f"acme:{OLD}\n")
    tokens = TokenFile(path, clock)
    path.write_text(f"acme:{OLD}\nbeta:{OLD}\n")
    clock.pass_a_period()
    assert caller(tokens, OLD).tenant == "acme"
    assert "lines 1 and 2" in caplog.text
    path.write_text(f"beta:{OLD}\n")
    clock.pass_a_period()
    assert caller(tokens, OLD).tenant == "beta"


NAMES = st.text(st.characters(categories=("L", "N"), exclude_characters=":#"), min_size=1)
SECRETS = st.text("abcdefgh01234567:", min_size=8, max_size=12)


@given(st.dictionaries(SECRETS, st.none() | NAMES, min_size=1, max_size=8))
def test_every_token_opens_as_its_own_tenant_and_claims_no_other(tmp_path_factory, tenants):
    path = tmp_path_factory.mktemp("tokens") / "tokens"
    path.write_text("\n".join(f"{name or ''}:{token}" for token, name in tenants.items()), "utf-8")
    tokens = TokenFile(path)
    named = {name for name in tenants.values() if name is not None}
    owners = {}
    for token, name in tenants.items():
        found = caller(tokens, token)
        assert found.tenant == name
        owners.setdefault(token if name is None else ("tenant", name), set()).add(found.owner)
        for claimed in ("", *named):
            if claimed in ("", name):
                assert found.tenant_of(claimed) == (name or "")
            else:
                with pytest.raises(InvalidRequestError, match="tenant"):
                    found.tenant_of(claimed)
        if name is None:
            assert found.tenant_of("no token's") == "no token's"
    distinct = [owner for each in owners.values() for owner in each]
    assert len(distinct) == len(set(distinct)) == len(owners)
