"""A Ray cluster: one that is there, or one of this machine alone."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
from typing import Any

from octavo.engine.errors import InvalidConfigError

LOOPBACK = "127.0.0.1"
REACH_S = 5.0
"""For the head of a cluster to take a connection."""
STAY_ON_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Of the environment. At 0 Ray takes a loopback address as this node's, as it always does on those
two systems; otherwise it takes another one of the machine's in place of a loopback address that it
is given, and listens on every interface. Ray reads it when it is imported."""
APP_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def require_ray(name: str, value: Any) -> None:
    """Says what is missing where Ray is not installed.

    Args:
        name, value: the setting that needs it.

    Raises:
        InvalidConfigError: Ray Serve cannot be imported here.
    """
    if any(importlib.util.find_spec(module) is None for module in ("ray", "starlette")):
        raise InvalidConfigError(
            name, value, "given where octavo[ray] is installed: pip install 'octavo[ray]'"
        )


def check_app_name(field: str, name: str) -> None:
    """Refuses what is no name of an application.

    Raises:
        InvalidConfigError: it is none; names `field`.
    """
    if not APP_NAME.fullmatch(name):
        allowed = "an application's name: 1 to 63 letters, digits, dots, dashes and underscores"
        raise InvalidConfigError(field, name, allowed)


def connect(address: str | None = None) -> None:
    """Connects this process to a cluster that is there.

    Args:
        address: of its head; None for that of RAY_ADDRESS, or else the one of this machine.

    Raises:
        InvalidConfigError: there is none, or it does not let this process in.
    """
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    _check_reachable(address)
    import ray

    from octavo.server.ray.compat import running_clusters, take_loopback_as_it_is

    there = running_clusters()
    there = there & {address} if address != "auto" else there
    if there and all(each.startswith(f"{LOOPBACK}:") for each in there):
        take_loopback_as_it_is()
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        allowed = (
            "the address of a Ray cluster that this machine is a node of; "
            "`octavo deploy --start-cluster` starts one. Its token must be in RAY_AUTH_TOKEN or "
            f"~/.ray/auth_token ({_first_line(error)})"
        )
        raise InvalidConfigError("address", address, allowed) from error


def _check_reachable(address: str) -> None:
    """Ray itself tries for minutes."""
    host, colon, port = address.rpartition(":")
    if "//" in host or not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
    except OSError as error:
        allowed = f"the address of a Ray cluster's head ({error})"
        raise InvalidConfigError("address", address, allowed) from None


def start_local() -> None:
    """Starts a cluster of this machine alone, which ends with this process.

    It listens on loopback addresses only and asks for a token, which Ray keeps in
    `~/.ray/auth_token` for this user's other processes. Servers are as urgent as other processes,
    where Ray would have them, and what looks after them, yield to all.

    Raises:
        InvalidConfigError: it does not start.
    """
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ[STAY_ON_LOOPBACK] = "0"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
    import ray

    try:
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            _node_ip_address=LOOPBACK,
        )
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        allowed = f"left out: no cluster can be started here ({_first_line(error)})"
        raise InvalidConfigError("start_cluster", True, allowed) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
