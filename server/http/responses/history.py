"""Conversations of the store: what a response goes on from, and the items that it was made of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from pydantic_core import from_json

from octavo.engine.errors import (
    InvalidRequestError,
    PreviousResponseNotFoundError,
    UnknownObjectError,
)
from octavo.server.caller import CALLER
from octavo.server.http.errors import encode
from octavo.server.http.responses.store import ResponseStore, StoredResponse

SETTING = "--responses-store-bytes"
"""Turns the store on."""
Item = dict[str, Any]
Keep = Callable[[dict[str, Any]], bool]
"""Keeps a response that has ended; whether there was room for it."""


class History:
    """The current caller's conversations.

    Args:
        store: that keeps them.
        max_bytes: most bytes of a conversation that a response may go on from: as many as a client
            may send as one input.
    """

    def __init__(self, store: ResponseStore, max_bytes: int) -> None:
        self._store = store
        self._max_bytes = max_bytes

    @property
    def is_on(self) -> bool:
        """Whether responses are kept at all."""
        return self._store.is_on

    async def before(self, previous_id: str | None) -> list[Item]:
        """The items of the conversation that ends with a response; none without one.

        Raises:
            InvalidRequestError: nothing is stored here, or the conversation is too long.
            PreviousResponseNotFoundError: the response, or one before it, is not stored.
        """
        if previous_id is None:
            return []
        if not self.is_on:
            allowed = (
                f"not given: this server stores no responses (octavo serve {SETTING} turns the "
                "store on); send the conversation as input"
            )
            raise InvalidRequestError("previous_response_id", previous_id, allowed)
        chain, missing = self._store.chain(CALLER.get().owner, previous_id)
        if missing is not None:
            gone = "it" if missing == previous_id else f"{missing}, before it in its conversation,"
            allowed = (
                f"a response that is stored: {gone} is not found here; it was deleted, had to make "
                "room or is another's. Send the conversation as input"
            )
            raise PreviousResponseNotFoundError("previous_response_id", previous_id, allowed)
        num_bytes = sum(len(each.inputs) + len(each.outputs) for each in chain)
        if num_bytes > self._max_bytes:
            allowed = f"at most {self._max_bytes} bytes"
            value = f"a conversation of {num_bytes} bytes"
            raise InvalidRequestError("previous_response_id", value, allowed)
        return [item for item in await _items(chain, len(chain)) if not _is_broken(item)]

    def keeper(self, previous_id: str | None, inputs: bytes) -> Keep:
        """What keeps the current caller's response once it has ended.

        Args:
            previous_id: of the response that it goes on from.
            inputs: its own items, a JSON list.
        """
        owner = CALLER.get().owner

        def keep(response: dict[str, Any]) -> bool:
            head = {name: value for name, value in response.items() if name != "output"}
            stored = StoredResponse(
                id=response["id"],
                previous_id=previous_id,
                head=encode(head),
                inputs=inputs,
                outputs=encode(response["output"]),
            )
            return self._store.put(owner, stored)

        return keep

    def response(self, response_id: str) -> bytes:
        """A response, JSON.

        Raises:
            UnknownObjectError: the caller has none of this id.
        """
        found = self._store.get(CALLER.get().owner, response_id)
        if found is None:
            raise self._unknown(response_id)
        return found.json

    def delete(self, response_id: str) -> None:
        """Forgets a response. Raises as `response`."""
        if not self._store.delete(CALLER.get().owner, response_id):
            raise self._unknown(response_id)

    async def input_items(self, response_id: str) -> list[Item]:
        """What a response was made of, the first item first: its own input, and the conversation
        before it as far back as that is stored. Raises as `response`."""
        chain, _ = self._store.chain(CALLER.get().owner, response_id)
        if not chain:
            raise self._unknown(response_id)
        num_bytes, first = 0, len(chain) - 1
        while first > 0:
            before = chain[first - 1]
            num_bytes += len(before.inputs) + len(before.outputs)
            if num_bytes > self._max_bytes:
                break
            first -= 1
        return [_listed(item) for item in await _items(chain[first:], len(chain) - first - 1)]

    def _unknown(self, response_id: str) -> UnknownObjectError:
        allowed = (
            "the id of a response that is stored: it is unknown, was deleted or had to make room"
            if self.is_on
            else f"the id of a stored response: this server stores none ({SETTING} turns it on)"
        )
        return UnknownObjectError("response_id", response_id, allowed)


async def _items(chain: Sequence[StoredResponse], num_outputs: int) -> list[Item]:
    """The items of responses, with the outputs of the first `num_outputs` of them."""
    items: list[Item] = []
    for index, response in enumerate(chain):
        items += from_json(response.inputs, cache_strings="none")
        if index < num_outputs:
            items += from_json(response.outputs, cache_strings="none")
        await asyncio.sleep(0)  # others' tokens come between
    return items


def _is_broken(item: Item) -> bool:
    """Whether an item is a call that its response broke off: nothing can answer such a call."""
    return bool(item["type"] == "function_call" and item["status"] != "completed")


def _listed(item: Item) -> Item:
    """An item as it is listed: texts of the model have annotations."""
    content = item.get("content")
    if item["type"] != "message" or not isinstance(content, list):
        return item
    parts = [
        {"annotations": [], **part} if part["type"] == "output_text" else part for part in content
    ]
    return {**item, "content": parts}
