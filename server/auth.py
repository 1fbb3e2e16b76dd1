"""Bearer tokens: several, from a file that may change while the server runs."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from octavo.engine.errors import InvalidConfigError, UnauthenticatedError
from octavo.server.caller import Caller

CHECK_PERIOD_S = 1.0
"""How often the file is looked at, at most."""
MIN_TOKEN_CHARS = 8
MAX_TENANT_CHARS = 256
OWNER_CHARS = 16
"""Of a token's digest, in hexadecimal, that stand for its holder."""

_SCHEME = "bearer "
_log = logging.getLogger(__name__)


class TokenFile:
    """Tokens that open the server: one a line; empty lines and lines that begin with # are skipped.

    A line is a token, or the name of the token's tenant, a colon and the token. A line that begins
    with a colon is a token without a tenant, which may then hold colons itself. Several tokens may
    name one tenant.

    The file is read again when it has changed, so that tokens rotate without a restart: put the new
    one beside the old one, move the clients, take the old one out. While it cannot be read or holds
    no token, the tokens read last stay good.

    Args:
        path: of the file.
        clock: seconds; for when to look again.

    Raises:
        InvalidConfigError: it cannot be read, or holds no token, one that is too short, or one that
            is given to two tenants; names the lines.
    """

    def __init__(self, path: str | Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = Path(path)
        self._clock = clock
        self._next_s = clock() + CHECK_PERIOD_S
        try:
            self._seen = self._stamp()
            self._callers = self._read()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidConfigError(
                "token_file", str(path), f"a readable file ({error})"
            ) from error
        _log.info("read the token file: %s", self.summary)

    @property
    def summary(self) -> str:
        """How many tokens there are, and of which tenants."""
        tenants = ", ".join(sorted(next(iter(self._callers.values())).reserved))
        return f"{len(self._callers)} tokens" + (f", tenants: {tenants}" if tenants else "")

    def check(self, header: str | None) -> Caller:
        """Lets the holder of a token pass.

        Args:
            header: the value of the call's `authorization`, or None.

        Returns:
            Whose call it is.

        Raises:
            UnauthenticatedError: there is none, or its token is not among the file's.
        """
        self._refresh()
        token = None if header is None else bearer_token(header)
        if token is None:
            raise UnauthenticatedError("give a token: 'authorization: Bearer TOKEN'")
        given = _digest(token)
        found = None
        for digest, caller in self._callers.items():
            # Every token is compared, and whole, so that the time taken tells nothing.
            if hmac.compare_digest(digest, given):
                found = caller
        if found is None:
            raise UnauthenticatedError("the token is not one that this server knows")
        return found

    def _refresh(self) -> None:
        now_s = self._clock()
        if now_s < self._next_s:
            return
        self._next_s = now_s + CHECK_PERIOD_S
        try:
            stamp = self._stamp()
            if stamp == self._seen:
                return
            self._callers = self._read()
            self._seen = stamp
            _log.warning("read the token file again: %s", self.summary)
        except (OSError, UnicodeDecodeError, InvalidConfigError) as error:
            _log.error("the token file cannot be used, its last tokens stay good: %s", error)

    def _stamp(self) -> tuple[int, int, int]:
        found = os.stat(self._path)
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> dict[bytes, Caller]:
        """Whose call it is, by a digest of the token."""
        lines: dict[bytes, tuple[int, str]] = {}
        for number, line in enumerate(self._path.read_text("utf-8").splitlines(), 1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            tenant, token = _parse(line)
            # Never the token itself.
            if len(token) < MIN_TOKEN_CHARS or not token.isascii():
                allowed = f"tokens of at least {MIN_TOKEN_CHARS} ASCII characters"
                raise self._refuse(allowed, number)
            if len(tenant) > MAX_TENANT_CHARS or not tenant.isprintable():
                allowed = f"names of tenants of at most {MAX_TENANT_CHARS} printable characters"
                raise self._refuse(allowed, number)
            before = lines.setdefault(_digest(token), (number, tenant))
            if before[1] != tenant:
                raise self._refuse("a token once, or of one tenant", before[0], number)
        if not lines:
            raise InvalidConfigError(
                "token_file", str(self._path), "a file with at least one token"
            )
        names = frozenset(tenant for _, tenant in lines.values() if tenant)
        return {
            digest: Caller(f"tenant {tenant}", tenant, names)
            if tenant
            else Caller(f"token {digest.hex()[:OWNER_CHARS]}", None, names)
            for digest, (_, tenant) in lines.items()
        }

    def _refuse(self, allowed: str, *numbers: int) -> InvalidConfigError:
        lines = f"line{'s' * (len(numbers) > 1)} {' and '.join(map(str, numbers))}"
        return InvalidConfigError("token_file", self._path, f"{allowed}; see {lines}")


def first_token(path: str | Path, field: str = "token_file") -> str:
    """The first token of a file as `TokenFile` reads it: what a client of that server shows.

    Raises:
        InvalidConfigError: it cannot be read, or holds no token; names `field`.
    """
    try:
        lines = Path(path).expanduser().read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfigError(field, str(path), f"a file that can be read ({error})") from None
    for line in map(str.strip, lines):
        if line and not line.startswith("#"):
            return _parse(line)[1]
    raise InvalidConfigError(field, str(path), "a file with a token")


def bearer_token(header: str) -> str | None:
    """The token of a call's `authorization`; None if that has another scheme."""
    if header[: len(_SCHEME)].lower() != _SCHEME:
        return None
    return header[len(_SCHEME) :].strip()


def _parse(line: str) -> tuple[str, str]:
    """The tenant of a line, empty for none, and its token."""
    tenant, colon, token = line.partition(":")
    return (tenant.strip(), token.strip()) if colon else ("", line)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
