"""Whether a port can be taken, asked before a library that answers with noise is."""

from __future__ import annotations

import errno
import socket


def check_bindable(host: str, port: int) -> None:
    """Binds every address of a host for a moment, as a server would.

    Args:
        host: name or address.
        port: 0 stands for a free one.

    Raises:
        OSError: the port is taken, the host is unknown, or none of its addresses is this
            machine's.
    """
    refusal: OSError | None = None
    bound = False
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
        try:
            with socket.socket(family, kind, protocol) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
                listener.listen(1)  # where addresses are reused, two may bind, but not listen
            bound = True
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                raise
            refusal = error
    if not bound and refusal is not None:
        raise refusal
