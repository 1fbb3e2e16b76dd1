"""How many file descriptors the process may have, and what of them connections may take."""

from __future__ import annotations

import logging
import resource

RESERVED = 512
"""Descriptors that no client's connection takes: files, pipes of replicas, the compiler's."""
WANTED = 65536
LEAST = 16

_log = logging.getLogger(__name__)


def raise_file_limit() -> int | None:
    """Raises the process's soft limit of file descriptors as far as its hard one allows.

    The default soft limit, often 1,024, is for programs that use `select`.

    Returns: the limit now; None where there is none.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:
            _log.warning("the limit of open files stays at %d: %s", soft, error)
            return soft
        return wanted
    return None if soft == resource.RLIM_INFINITY else soft


def most_connections(wanted: int) -> int:
    """Connections that one of the two ports may hold: `wanted`, or what descriptors allow."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    return max(LEAST, min(wanted, (soft - min(RESERVED, soft // 2)) // 2))
