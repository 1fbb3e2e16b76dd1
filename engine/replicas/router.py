"""Which replica of one host takes a request: `engine/routing` as `ReplicatedEngine` uses it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from octavo.engine.errors import OverloadedError
from octavo.engine.routing import router as routing
from octavo.engine.routing.policies import get_route_policy
from octavo.engine.routing.prefixes import CHUNK_TOKENS, MAX_CHUNKS, prompt_chunks
from octavo.engine.routing.request import Route, RouteRequest

DEFAULT_POLICY = "least_work"

__all__ = ["CHUNK_TOKENS", "DEFAULT_POLICY", "MAX_CHUNKS", "Router"]


class Router:
    """Chooses replicas, and keeps count of what they have to do. Not thread-safe.

    Args:
        num_replicas: how many there are.
        policy: as for `get_route_policy`. It sees what was sent here and nothing that replicas
            report, as they report too seldom for a policy that needs it.
    """

    def __init__(self, num_replicas: int, policy: str = DEFAULT_POLICY) -> None:
        self._router = routing.Router(
            num_replicas, get_route_policy(policy), most_chunks=MAX_CHUNKS
        )

    def choose(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        *,
        num_sequences: int = 1,
        tenant: str = "",
        cache_salt: str = "",
        among: Collection[int],
    ) -> int:
        """Takes a request into account until `ended`.

        Args:
            request_id: of its own.
            prompt_token_ids: the prompt.
            max_tokens: most tokens of each sequence's answer.
            num_sequences: answers to it.
            tenant, cache_salt: prompts of another tenant or salt share nothing.
            among: replicas that can take it, one at least.

        Returns:
            The replica that has done with it first; of equals, the first.

        Raises:
            OverloadedError: the policy would have nobody take it.
        """
        request = RouteRequest(
            request_id=request_id,
            num_prompt_tokens=len(prompt_token_ids),
            chunks=prompt_chunks(prompt_token_ids, tenant=tenant, cache_salt=cache_salt),
            max_tokens=max_tokens,
            num_sequences=num_sequences,
        )
        choice = self._router.route(request, 0.0, among=among)
        if not isinstance(choice, Route):
            raise OverloadedError(choice.reason, choice.retry_after_s)
        return choice.replica

    def ended(self, request_id: str, output_len: int | None = None) -> None:
        """A request is over, or taken back.

        Args:
            output_len: tokens of its first answer; None where that tells nothing of others.
        """
        self._router.ended(request_id, output_len)

    def forget(self, replica: int) -> None:
        """A replica has lost its prefix cache."""
        self._router.prefixes.forget(replica)

    def work(self, replica: int) -> float:
        """What a replica has to do, in tokens of prompts."""
        return float(self._router.view.own_work[replica])
