"""What connections may take of the process's file descriptors."""

from __future__ import annotations

import resource

RESERVED = 512
"""Descriptors that no client's connection takes: files, pipes of replicas, the compiler's."""
LEAST = 16


def most_connections(wanted: int) -> int:
    """Connections that one of the two ports may hold: `wanted`, or what descriptors allow."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    return max(LEAST, min(wanted, (soft - min(RESERVED, soft // 2)) // 2))
