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

CHECK_PERIOD_S = 1.0
"""How often the file is looked at, at most."""
MIN_TOKEN_CHARS = 8

_SCHEME = "bearer "
_log = logging.getLogger(__name__)


class TokenFile:
    """Tokens that open the server: one a line; empty lines and lines that begin with # are skipped.

    The file is read again when it has changed, so that tokens rotate without a restart: put the new
    one beside the old one, move the clients, take the old one out. While it cannot be read or holds
    no token, the tokens read last stay good.

    Args:
        path: of the file.
        clock: seconds; for when to look again.

    Raises:
        InvalidConfigError: it cannot be read, or holds no token, or one that is too short.
    """

    def __init__(self, path: str | Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = Path(path)
        self._clock = clock
        self._next_s = clock() + CHECK_PERIOD_S
        try:
            self._seen = self._stamp()
            self._digests = self._read()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidConfigError(
                "token_file", str(path), f"a readable file ({error})"
            ) from error

    def check(self, header: str | None) -> None:
        """Lets the holder of a token pass.

        Args:
            header: the value of the call's `authorization`, or None.

        Raises:
            UnauthenticatedError: there is none, or its token is not among the file's.
        """
        self._refresh()
        if header is None or not header[: len(_SCHEME)].lower() == _SCHEME:
            raise UnauthenticatedError("give a token: 'authorization: Bearer TOKEN'")
        given = _digest(header[len(_SCHEME) :].strip())
        found = False
        for digest in self._digests:
            # Every token is compared, and whole, so that the time taken tells nothing.
            found |= hmac.compare_digest(digest, given)
        if not found:
            raise UnauthenticatedError("the token is not one that this server knows")

    def _refresh(self) -> None:
        now_s = self._clock()
        if now_s < self._next_s:
            return
        self._next_s = now_s + CHECK_PERIOD_S
        try:
            stamp = self._stamp()
            if stamp == self._seen:
                return
            self._digests = self._read()
            self._seen = stamp
            _log.warning("read the token file again: %d tokens", len(self._digests))
        except (OSError, UnicodeDecodeError, InvalidConfigError) as error:
            _log.error("the token file cannot be used, its last tokens stay good: %s", error)

    def _stamp(self) -> tuple[int, int, int]:
        found = os.stat(self._path)
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> tuple[bytes, ...]:
        lines = [line.strip() for line in self._path.read_text("utf-8").splitlines()]
        tokens = [line for line in lines if line and not line.startswith("#")]
        if not tokens:
            raise InvalidConfigError(
                "token_file", str(self._path), "a file with at least one token"
            )
        if any(len(token) < MIN_TOKEN_CHARS or not token.isascii() for token in tokens):
            # Never the token itself.
            allowed = f"tokens of at least {MIN_TOKEN_CHARS} ASCII characters"
            raise InvalidConfigError("token_file", str(self._path), allowed)
        return tuple(map(_digest, tokens))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
