"""What is known of an application's servers."""

from __future__ import annotations

import pytest

from octavo.server.ray.members import SILENT_S, Member, Members
from octavo.server.ray.watch import addresses_on

ONE, TWO = Member("127.0.0.1:1", "node-a"), Member("127.0.0.1:2", "node-a")


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_servers_are_those_that_replicas_tell(clock: Clock) -> None:
    members = Members(clock)
    members.tell("one", ONE)
    members.tell("two", TWO)
    members.tell("one", ONE)
    assert members.all() == [ONE, TWO]
    assert members.leave("one") == 1
    assert members.leave("never there") == 1
    assert members.leave("two") == 0


def test_a_replica_that_falls_silent_is_forgotten(clock: Clock) -> None:
    members = Members(clock)
    members.tell("one", ONE)
    clock.now_s += SILENT_S
    members.tell("two", TWO)
    assert members.all() == [ONE, TWO]
    clock.now_s += 1.0
    assert members.all() == [TWO]
    members.tell("one", ONE)
    assert members.all() == [TWO, ONE]


def test_a_loopback_address_means_a_server_on_its_own_node_alone() -> None:
    anywhere = Member("10.0.0.7:1", "")
    members = [ONE, anywhere, Member("127.0.0.1:1", "node-b")]
    assert addresses_on("node-a", members) == [ONE.address, anywhere.address]
    assert addresses_on("node-c", members) == [anywhere.address]
