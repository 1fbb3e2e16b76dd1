"""Private interfaces of Ray, each with what happens where a version has it no more."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


def running_clusters() -> set[str]:
    """`host:port` of the heads of the clusters that this machine is a node of, if Ray can tell."""
    from ray._private import services

    find = getattr(services, "find_gcs_addresses", None)
    return set() if find is None else set(find())


def take_loopback_as_it_is() -> None:
    """Has Ray take a loopback address for itself, for a cluster that listens nowhere else.

    It would speak to another address of the machine instead. `cluster.STAY_ON_LOOPBACK` does the
    same before Ray is imported. A version that does not know this attribute does not connect.
    """
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False


def with_version(deployment: Any, version: str) -> Any:
    """A deployment of this version: Serve keeps the replicas that run, if theirs is the same.

    Without, it replaces all of them whenever it is told how many there should be. It still does so
    where Ray does not take a version any more.

    Args:
        deployment: as `serve.deployment` made it.
        version: alike for deployments whose replicas are alike.
    """
    try:
        return deployment.options(version=version, _internal=True)
    except (TypeError, ValueError) as error:
        logger.warning("this version of Ray Serve replaces every server: %s", error)
        return deployment


def keep_replica_to(host: str) -> None:
    """Has Serve's own gRPC server of this replica listen on one address.

    Serve binds it to every interface, for other deployments that call this one; none does. For a
    replica's process, before the replica is ready.

    Args:
        host: address of this node.
    """
    from ray.serve._private import replica

    add_port = getattr(replica, "add_port_to_grpc_server", None)
    if add_port is None:
        logger.warning("this version of Ray Serve listens where it likes, beside the server")
        return

    def add_port_of_host(server: Any, address: str) -> Any:
        bracketed = f"[{host}]" if ":" in host else host
        return add_port(server, address.replace("[::]", bracketed))

    replica.add_port_to_grpc_server = add_port_of_host
