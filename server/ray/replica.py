"""A Ray Serve replica: it keeps a server, says where it is and whether it is well.

Token streams do not pass through it. A front speaks to the server itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import grpc
import ray
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ray import serve

from octavo.engine.errors import EngineDeadError
from octavo.server.auth import first_token
from octavo.server.client import AsyncOctavoClient
from octavo.server.ray.autoscaling import NUM_REQUESTS, NUM_ROWS
from octavo.server.ray.cluster import LOOPBACK
from octavo.server.ray.compat import keep_replica_to
from octavo.server.ray.members import NAMESPACE, TELL_S, Member, Members, actor_name
from octavo.server.ray.server_process import ServerProcess

ANSWER_S = 5.0
"""For an answer of the server, or of the actor that knows the members."""

logger = logging.getLogger(__name__)


class ServerReplica:
    """Keeps `octavo serve` as a child that ends with this process.

    Args:
        words: options of `octavo serve`, but for where it listens.
        listens_on_node: whether it listens on this node's address; otherwise on a loopback address.
        token_file: of the server; None for none.
        drain_s: for the server to finish what it has when Serve takes the replica away.

    Raises:
        EngineDeadError: the server ends before it serves.
    """

    async def __init__(  # type: ignore[misc]  # as Serve allows
        self,
        words: Sequence[str],
        *,
        listens_on_node: bool,
        token_file: str | None,
        drain_s: float,
    ) -> None:
        context = serve.get_replica_context()
        self._app, self._name = context.app_name, context.replica_id.unique_id
        self._token_file, self._drain_s = token_file, drain_s
        self._members: Any = None
        self._telling: asyncio.Task[None] | None = None
        keep_replica_to(ray.util.get_node_ip_address())
        host = ray.util.get_node_ip_address() if listens_on_node else LOOPBACK
        node = "" if listens_on_node else ray.get_runtime_context().get_node_id()
        self._server = ServerProcess((*words, "--host", host, "--grpc-port", "0"))
        address = await asyncio.to_thread(self._server.address)
        self._member = Member(address, node)
        self._health = health_pb2_grpc.HealthStub(grpc.aio.insecure_channel(address))
        self._telling = asyncio.create_task(self._keep_telling())

    async def check_health(self) -> None:
        """Serve asks this and replaces a replica that raises three times in a row.

        Raises:
            EngineDeadError: the server has ended or does not serve.
            grpc.aio.AioRpcError: it does not answer.
        """
        if self._server.status is not None:
            raise EngineDeadError(f"`octavo serve` ended with status {self._server.status}")
        request = health_pb2.HealthCheckRequest()
        answer = await self._health.Check(request, timeout=ANSWER_S)
        if answer.status != health_pb2.HealthCheckResponse.SERVING:
            raise EngineDeadError("the server does not serve; its log says why")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What `SaturationPolicy` reads: requests that the server has, and rows."""
        token = None if self._token_file is None else first_token(self._token_file)
        async with AsyncOctavoClient(
            self._member.address, timeout_s=ANSWER_S, token=token, retry=None
        ) as client:
            standing = (await client.load()).standing
        num_requests = standing.num_running + standing.num_waiting
        return {NUM_REQUESTS: float(num_requests), NUM_ROWS: float(standing.num_rows)}

    async def _keep_telling(self) -> None:
        """Says where the server is as long as it runs."""
        while self._server.status is None:
            try:
                async with asyncio.timeout(ANSWER_S):
                    if self._members is None:
                        self._members = await asyncio.to_thread(self._find_members)
                    await self._members.tell.remote(self._name, self._member)
            except Exception as error:
                logger.warning("the members' actor does not answer: %s", error)
                self._members = None
            await asyncio.sleep(TELL_S)

    def _find_members(self) -> Any:
        """The actor that knows the members: the first replica that looks for it starts it."""
        options = {
            "name": actor_name(self._app), "namespace": NAMESPACE, "get_if_exists": True,
            "lifetime": "detached", "num_cpus": 0,
        }  # fmt: skip
        return ray.remote(Members).options(**options).remote()

    async def _leave(self) -> None:
        """Takes the server out of the members; the last of them ends their actor."""
        if self._members is None:
            return
        try:
            async with asyncio.timeout(ANSWER_S):
                num_left = await self._members.leave.remote(self._name)
        except Exception as error:
            logger.warning("the members' actor does not answer: %s", error)
        else:
            if not num_left:
                ray.kill(self._members)

    async def __del__(self) -> None:
        """Serve awaits this when it takes the replica away: the server drains, then ends."""
        if self._telling is not None:
            self._telling.cancel()
            await self._leave()
        await asyncio.to_thread(self._server.end, self._drain_s)
