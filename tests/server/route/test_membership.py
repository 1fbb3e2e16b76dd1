"""Which servers a front has."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from octavo.engine.errors import InvalidConfigError
from octavo.server.route.membership import MAX_BACKENDS, Membership


def look(*sources: str) -> list[str]:
    return asyncio.run(Membership(sources).look())


def test_addresses_that_are_given_are_all() -> None:
    assert look("one:1", "[::1]:2") == ["one:1", "[::1]:2"]
    assert Membership(["one:1"]).is_fixed


def test_a_name_is_all_its_addresses() -> None:
    assert "127.0.0.1:50051" in look("dns:localhost:50051")
    assert not Membership(["dns:localhost:50051"]).is_fixed


def test_a_name_that_has_none_now_keeps_those_that_it_had(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> list[list[str]]:
        members, found = Membership(["dns:pods.example:5", "a:1"]), []
        for addresses in (["10.0.0.2", "10.0.0.1", "fd00::1"], None, None, ["10.0.0.3"]):

            async def resolve(*_: object, now: list[str] | None = addresses, **__: object) -> list:
                if now is None:
                    raise OSError("no such name")
                return [(0, 0, 0, "", (address, 5)) for address in now]

            monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve, raising=False)
            found.append(await members.look())
        return found

    with caplog.at_level(logging.WARNING):
        first, second, third, last = asyncio.run(run())
    assert first == ["10.0.0.1:5", "10.0.0.2:5", "[fd00::1]:5", "a:1"]
    assert second == third == first
    assert last == ["10.0.0.3:5", "a:1"]
    assert caplog.text.count("no such name") == 1


def test_a_file_names_one_a_line_and_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "servers"
    path.write_text("one:1  # the first\n\n# none\ntwo:2\none:1\n")
    members = Membership([f"file:{path}", "two:2"])
    assert asyncio.run(members.look()) == ["one:1", "two:2"]
    path.write_text("three:3\n")
    assert asyncio.run(members.look()) == ["three:3", "two:2"]
    path.write_text("three\n")
    assert asyncio.run(members.look()) == ["three:3", "two:2"]
    path.unlink()
    assert asyncio.run(members.look()) == ["three:3", "two:2"]
    path.write_text("")
    assert asyncio.run(members.look()) == ["two:2"]


def test_no_more_are_used_than_may_be(tmp_path: Path) -> None:
    path = tmp_path / "servers"
    path.write_text("".join(f"host{n}:1\n" for n in range(MAX_BACKENDS + 9)))
    assert len(look(f"file:{path}")) == MAX_BACKENDS


@pytest.mark.parametrize(
    "sources",
    [[], ["one"], ["one:0"], ["one:70000"], [":5"], ["dns:one"], ["dns::5"], ["file:/nowhere"],
     ["one:1", "one:1"]],
)  # fmt: skip
def test_what_says_no_server_is_refused(sources: list[str]) -> None:
    with pytest.raises(InvalidConfigError, match="backend"):
        Membership(sources)


def test_a_line_that_is_no_address_is_named(tmp_path: Path) -> None:
    path = tmp_path / "servers"
    path.write_text("one:1\ntwo\n")
    with pytest.raises(InvalidConfigError, match=r"servers:2 = 'two' is not allowed: host:port"):
        Membership([f"file:{path}"])
