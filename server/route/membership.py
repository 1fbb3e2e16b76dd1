"""Which servers a front has: addresses that were given, all of a name, or those in a file."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from pathlib import Path

from octavo.engine.errors import InvalidConfigError
from octavo.server.ray.cluster import check_app_name, require_ray
from octavo.server.ray.watcher import MembersWatcher

MAX_BACKENDS = 1024
FORMS = "HOST:PORT, dns:NAME:PORT, file:PATH or ray:APP"
LIVE = ("dns:", "file:", "ray:")

logger = logging.getLogger(__name__)


class Membership:
    """Says which servers there are, each time it is asked.

    Args:
        sources: each `HOST:PORT`, one server; `dns:NAME:PORT`, every address that a name has, such
            as that of a headless service of Kubernetes; `file:PATH`, an address a line, where
            `#` begins a comment; or `ray:APP`, the servers of an application on the Ray cluster
            that this machine is a node of.

    Raises:
        InvalidConfigError: one has none of these forms, or is there twice, its file cannot be read,
            Ray is not installed, or there is none.
    """

    def __init__(self, sources: Sequence[str]) -> None:
        if not 1 <= len(sources) <= MAX_BACKENDS:
            allowed = f"1 to {MAX_BACKENDS} of them"
            raise InvalidConfigError("backend", f"{len(sources)} servers", allowed)
        for source in sources:
            kind, _, rest = source.partition(":")
            if kind == "file":
                _read(Path(rest), "backend")
            elif kind == "ray":
                require_ray("backend", source)
                check_app_name("backend", rest)
            elif not _is_target(rest if kind == "dns" else source):
                raise InvalidConfigError("backend", source, FORMS)
            if sources.count(source) > 1:
                raise InvalidConfigError("backend", source, "given once")
        self._sources = sources
        self._known: dict[str, list[str]] = {}
        self._failing: dict[str, str] = {}
        self._watchers: dict[str, MembersWatcher] = {}

    @property
    def is_fixed(self) -> bool:
        """Whether servers come and go by nothing but their own lives."""
        return not any(source.startswith(LIVE) for source in self._sources)

    async def look(self) -> list[str]:
        """Addresses of the servers there are, each once.

        A source that says nothing now says what it said last: a name without addresses is that of
        servers that all start again.
        """
        found: dict[str, None] = {}
        for source in self._sources:
            try:
                self._known[source] = await self._targets(source)
            except (OSError, InvalidConfigError) as error:
                if self._failing.get(source) != str(error):
                    logger.warning("%s tells no servers: %s", source, error)
                self._failing[source] = str(error)
            else:
                self._failing.pop(source, None)
            found |= dict.fromkeys(self._known.get(source, ()))
        if len(found) > MAX_BACKENDS:
            logger.error("%d servers: only the first %d are used", len(found), MAX_BACKENDS)
        return list(found)[:MAX_BACKENDS]

    async def _targets(self, source: str) -> list[str]:
        kind, _, rest = source.partition(":")
        if kind == "file":
            return _read(Path(rest), "backend")
        if kind == "ray":
            if source not in self._watchers:
                self._watchers[source] = MembersWatcher(rest)
            return self._watchers[source].addresses()
        return await _addresses(rest) if kind == "dns" else [source]


async def _addresses(name: str) -> list[str]:
    """All addresses of `NAME:PORT`."""
    host, _, port = name.rpartition(":")
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    hosts = sorted({str(address[0]) for *_, address in found})
    return [f"[{each}]:{port}" if ":" in each else f"{each}:{port}" for each in hosts]


def _read(path: Path, name: str) -> list[str]:
    """The addresses in a file.

    Raises:
        InvalidConfigError: it cannot be read, or has a line that is no address.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise InvalidConfigError(
            name, f"file:{path}", f"a file that can be read ({error})"
        ) from None
    found = []
    for number, line in enumerate(lines, 1):
        target = line.partition("#")[0].strip()
        if target and not _is_target(target):
            raise InvalidConfigError(f"{path}:{number}", target, "host:port")
        if target:
            found.append(target)
    return found


def _is_target(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and 0 < int(port[:6]) < 1 << 16
