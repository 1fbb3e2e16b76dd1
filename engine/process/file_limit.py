"""How many file descriptors a process may have."""

from __future__ import annotations

import logging

WANTED = 65536

_log = logging.getLogger(__name__)


def raise_file_limit() -> int | None:
    """Raises the process's soft limit of file descriptors as far as its hard one allows.

    The default soft limit, often 1,024, is for programs that use `select`.

    Returns: the limit now; None where there is none.
    """
    import resource  # Unix alone has it, and a server alone asks

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
