"""Hosts meet those who know the token and are what they are, and say of others why not."""

from __future__ import annotations

import dataclasses
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.config import EngineConfig
from octavo.engine.errors import HostLostError, InvalidConfigError
from octavo.engine.hosts.handshake import Door, join
from octavo.engine.hosts.hosts_config import HostsConfig
from octavo.engine.hosts.identity import facts_of_process
from octavo.engine.hosts.messages import Kind, Link, Message, encode

FACTS = {"octavo": "1", "dtype": "float32", "block_size": None}


@pytest.fixture
def place(tmp_path: Path) -> HostsConfig:
    """Host 0 of three, on a free port."""
    token = tmp_path / "token"
    token.write_text("a secret of the group\n")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return HostsConfig(
        coordinator=f"127.0.0.1:{port - 1}",
        num_hosts=3,
        host_id=0,
        hosts_token_file=str(token),
        hosts_start_s=20.0,
    )


class Joining(threading.Thread):
    """A host that joins, and what came of it."""

    def __init__(self, place: HostsConfig, facts: Any = FACTS, **changes: Any) -> None:
        super().__init__(daemon=True)
        self._args = dataclasses.replace(place, **changes), facts
        self.link: Link | None = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.link = join(*self._args)
        except Exception as error:
            self.error = error

    def ended(self) -> Exception | None:
        self.join(20)
        assert not self.is_alive()
        return self.error


def test_all_hosts_meet_and_speak_with_keys_of_their_meeting(place: HostsConfig) -> None:
    hosts = [Joining(place, host_id=index) for index in (2, 1)]  # also before there is a leader
    door = Door(place)
    links = door.meet_all(FACTS)
    assert sorted(links) == [1, 2]
    frame = encode(Message(Kind.PING, (7,)), 0, door.commands_key)
    for index, host in zip((2, 1), hosts, strict=True):
        assert host.ended() is None
        assert host.link is not None
        links[index].send_frame(frame)
        assert host.link.receive(10).numbers == (7,)
        host.link.send(Message(Kind.ALIVE, (index,)))
        assert links[index].receive(10).numbers == (index,)
        host.link.close()
        links[index].close()


@pytest.mark.parametrize(
    ("facts", "field"),
    [
        ({**FACTS, "dtype": "bfloat16"}, "dtype"),
        ({**FACTS, "octavo": "2"}, "octavo"),
        ({**FACTS, "block_size": 16}, "block_size"),
        ({**FACTS, "unheard of": 1}, "unheard of"),
    ],
)
def test_a_host_that_differs_is_refused_by_name_on_both_sides(
    place: HostsConfig, facts: dict[str, Any], field: str
) -> None:
    host = Joining(place, facts, host_id=1)
    with pytest.raises(InvalidConfigError, match="as on host 0") as raised:
        Door(place).meet_all(FACTS)
    assert raised.value.field == field
    error = host.ended()
    assert isinstance(error, InvalidConfigError)
    assert (error.field, error.value) == (field, facts[field])


def test_two_hosts_of_one_number_are_refused(place: HostsConfig) -> None:
    hosts = [Joining(place, host_id=1) for _ in range(2)]
    with pytest.raises(InvalidConfigError, match=r"host_id = 1 .* missing: \[2\]"):
        Door(place).meet_all(FACTS)
    errors = [host.ended() for host in hosts]
    assert sum(isinstance(error, InvalidConfigError) for error in errors) == 1
    for host in hosts:
        if host.link is not None:
            host.link.close()


def test_who_does_not_know_the_token_is_sent_away_and_the_others_meet(
    place: HostsConfig, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.write_text("a secret of another group\n")
    meeting = threading.Thread(target=lambda: found.update(Door(place).meet_all(FACTS)))
    found: dict[int, Link] = {}
    meeting.start()
    stranger = Joining(place, host_id=1, hosts_token_file=str(other))
    error = stranger.ended()
    assert isinstance(error, InvalidConfigError)
    assert error.field == "hosts_token_file"
    with socket.create_connection(place.log_address) as noise:
        noise.sendall(b"GET / HTTP/1.1\r\n\r\n" * 9)
    hosts = [Joining(place, host_id=index) for index in (1, 2)]
    meeting.join(20)
    assert sorted(found) == [1, 2]
    for host in hosts:
        assert host.ended() is None
        assert host.link is not None
        host.link.close()
    for link in found.values():
        link.close()


def test_a_leader_that_does_not_know_the_token_gets_no_follower(place: HostsConfig) -> None:
    host = Joining(place, host_id=1)
    with socket.create_server(place.log_address) as server:
        link = Link(server.accept()[0])
        link.send(Message.of_json(Kind.CHALLENGE, {"nonce": "00", "protocol": 1}))
        hello = link.receive(10).json()
        link.send(Message.of_json(Kind.WELCOME, {"proof": hello["proof"]}))
        error = host.ended()
        link.close()
    assert isinstance(error, HostLostError)
    assert "does not know the token" in str(error)


def test_hosts_that_do_not_come_are_named(place: HostsConfig) -> None:
    late = dataclasses.replace(place, hosts_start_s=0.05)
    with pytest.raises(HostLostError, match=r"hosts \[1, 2\] have not come"):
        Door(late).meet_all(FACTS)
    with pytest.raises(HostLostError, match=r"no leader at 127\.0\.0\.1:"):
        join(dataclasses.replace(late, host_id=1), FACTS)


def test_a_port_that_is_taken_is_refused_by_name(place: HostsConfig) -> None:
    with (
        socket.create_server(place.log_address),
        pytest.raises(InvalidConfigError, match="coordinator = '127"),
    ):
        Door(place)


def test_settings_that_change_programs_are_compared_and_others_are_not(tiny_model: Path) -> None:
    def facts(**changes: Any) -> dict[str, Any]:
        return facts_of_process(EngineConfig(model=str(tiny_model), **changes), tiny_model)

    plain = facts()
    assert facts(scheduling_policy="slo", served_model_name="x", compile_cache_dir="") == plain
    for changes in (
        {"block_size": 32},
        {"dtype": "float32"},
        {"num_decode_steps": 2},
        {"seed": 1},
        {"host_kv_memory_bytes": 1},
        {"tensor_parallel_size": 2},
    ):
        (name,) = changes
        assert facts(**changes)[name] != plain[name]
