"""How hosts of a group meet: each proves that it knows the token, and is what the leader is.

The leader sends a nonce. A follower answers with one of its own, with a proof, which is a keyed
hash of both, and with what it is. The leader proves itself in turn, or says what differs. From then
on each side's messages have a key of this meeting.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import time
from dataclasses import dataclass
from typing import Any

from octavo.engine.errors import HostLostError, InvalidConfigError, OctavoError
from octavo.engine.hosts.hosts_config import HostsConfig
from octavo.engine.hosts.identity import PROTOCOL, Facts, check_same
from octavo.engine.hosts.messages import BrokenLinkError, Kind, Link, Message

logger = logging.getLogger(__name__)

GREETING_S = 10.0
"""Seconds that a handshake may take."""
RETRY_S = 0.2


@dataclass(frozen=True, slots=True)
class _Meeting:
    """What both sides hash."""

    token: bytes
    leader_nonce: str
    follower_nonce: str
    host_id: int

    def proof(self, side: str) -> str:
        """That a side knows the token."""
        return self._keyed(f"proof {side}").hex()

    def reports_key(self) -> bytes:
        """Of what this follower tells."""
        return self._keyed("reports")

    def commands_key(self) -> bytes:
        """Of what the leader tells all of them."""
        return _hash(self.token, f"commands {self.leader_nonce}")

    def _keyed(self, purpose: str) -> bytes:
        nonces = f"{self.leader_nonce} {self.follower_nonce}"
        return _hash(self.token, f"{purpose} {nonces} {self.host_id}")


def _hash(token: bytes, text: str) -> bytes:
    return hmac.digest(token, text.encode(), "sha256")


class Door:
    """Where the leader listens for its followers.

    Args:
        config: the leader's place.

    Raises:
        InvalidConfigError: the address cannot be bound, or there is no token where one is needed.
    """

    def __init__(self, config: HostsConfig) -> None:
        self._config = config
        self._token = config.token()
        self._nonce = secrets.token_hex(16)
        family = socket.AF_INET6 if ":" in config.log_bind[0] else socket.AF_INET
        try:
            self._socket = socket.create_server(config.log_bind, family=family)
        except OSError as error:
            host, port = config.log_bind
            allowed = f"an address of this host whose port {port} is free ({error})"
            raise InvalidConfigError("coordinator", f"{host}:{port - 1}", allowed) from error

    @property
    def commands_key(self) -> bytes:
        """Of the leader's messages, once all are there."""
        return _Meeting(self._token, self._nonce, "", 0).commands_key()

    def meet_all(self, ours: Facts) -> dict[int, Link]:
        """Waits for every follower; their links by number. Then nobody else is let in.

        Who does not know the token, or speaks another language, is sent away.

        Raises:
            InvalidConfigError: a host that knows the token differs from this one.
            HostLostError: not all have come in time.
        """
        until_s = time.monotonic() + self._config.hosts_start_s
        found: dict[int, Link] = {}
        with self._socket, contextlib.ExitStack() as on_failure:
            while len(found) < self._config.size - 1:
                missing = sorted(set(range(1, self._config.size)) - found.keys())
                left_s = until_s - time.monotonic()
                self._socket.settimeout(max(0.001, left_s))
                try:
                    accepted, address = self._socket.accept()
                except TimeoutError:
                    raise HostLostError(f"hosts {missing} have not come") from None
                link = Link(accepted)
                on_failure.callback(link.close)
                try:
                    found[self._meet(link, missing, ours)] = link
                except BrokenLinkError as error:
                    logger.warning("%s was sent away: %s", address[0], error)
                    link.close()
            on_failure.pop_all()
        return found

    def _meet(self, link: Link, missing: list[int], ours: Facts) -> int:
        """The number of the host at the other end, which belongs to the group."""
        link.send(Message.of_json(Kind.CHALLENGE, {"nonce": self._nonce, "protocol": PROTOCOL}))
        hello = _content(link.receive(GREETING_S), Kind.HELLO)
        host_id, theirs = _number(hello.get("host_id")), hello.get("facts")
        meeting = _Meeting(self._token, self._nonce, str(hello.get("nonce")), host_id)
        if not hmac.compare_digest(str(hello.get("proof")), meeting.proof("follower")):
            error = InvalidConfigError("hosts_token_file", "another token", "the leader's token")
            link.send(refusal(error))
            raise BrokenLinkError("it does not know the token")
        try:
            if host_id not in missing or not isinstance(theirs, dict):
                raise InvalidConfigError("host_id", host_id, f"one of those missing: {missing}")
            check_same(theirs, ours, host_id)
        except InvalidConfigError as error:
            link.send(refusal(error))
            raise
        link.send(Message.of_json(Kind.WELCOME, {"proof": meeting.proof("leader")}))
        link.trust(meeting.commands_key(), meeting.reports_key())
        return host_id


def join(config: HostsConfig, facts: Facts) -> Link:
    """Joins the leader; waits for it to come.

    Args:
        facts: what this host is.

    Raises:
        InvalidConfigError: this host differs from the leader, or does not know its token.
        HostLostError: the leader has not come in time, or does not know the token.
    """
    token = config.token()
    until_s = time.monotonic() + config.hosts_start_s
    assert config.host_id is not None
    while True:
        try:
            link = Link(socket.create_connection(config.log_address, timeout=GREETING_S))
            try:
                return _greet(link, token, config.host_id, facts)
            except BaseException:
                link.close()
                raise
        except OctavoError:
            raise
        except OSError as error:
            if time.monotonic() > until_s:
                host, port = config.log_address
                raise HostLostError(f"no leader at {host}:{port}: {error}") from error
            time.sleep(RETRY_S)


def _greet(link: Link, token: bytes, host_id: int, facts: Facts) -> Link:
    challenge = _content(link.receive(GREETING_S), Kind.CHALLENGE)
    meeting = _Meeting(token, str(challenge.get("nonce")), secrets.token_hex(16), host_id)
    hello = {"nonce": meeting.follower_nonce, "proof": meeting.proof("follower")}
    link.send(Message.of_json(Kind.HELLO, hello | {"host_id": host_id, "facts": facts}))
    try:
        welcome = _content(link.receive(GREETING_S), Kind.WELCOME)
    except BrokenLinkError as error:
        raise BrokenLinkError(f"the leader did not answer: {error}") from error
    if not hmac.compare_digest(str(welcome.get("proof")), meeting.proof("leader")):
        raise HostLostError("who listens at the coordinator's address does not know the token")
    link.trust(meeting.reports_key(), meeting.commands_key())
    return link


def refusal(error: InvalidConfigError) -> Message:
    """A message that says what is refused."""
    content = {"field": error.field, "value": error.value, "allowed": error.allowed}
    return Message.of_json(Kind.REFUSED, content)


def refused(message: Message) -> InvalidConfigError:
    """The error of a refusal."""
    content = message.json()
    return InvalidConfigError(content["field"], content["value"], content["allowed"])


def _number(value: object) -> int:
    """A host's number, as it came."""
    return value if isinstance(value, int) else -1


def _content(message: Message, kind: Kind) -> dict[str, Any]:
    """The content of a message that must be of a kind.

    Raises:
        InvalidConfigError: it is a refusal instead.
        BrokenLinkError: it is anything else.
    """
    if message.kind is Kind.REFUSED:
        raise refused(message)
    content = message.json()
    if message.kind is not kind or not isinstance(content, dict):
        raise BrokenLinkError(f"{message.kind.name} came in place of {kind.name}")
    return content
