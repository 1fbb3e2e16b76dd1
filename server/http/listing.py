"""Pages of lists, as OpenAI's API gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import Query

from octavo.engine.errors import InvalidRequestError

Order = Literal["asc", "desc"]
Limit = Annotated[int, Query(ge=1, le=100)]


def page_of(
    items: Sequence[dict[str, Any]],
    *,
    limit: int,
    order: Order = "desc",
    after: str | None = None,
    before: str | None = None,
) -> dict[str, Any]:
    """A page of a list.

    Args:
        items: the oldest first.
        limit: most items of the page.
        order: "desc" begins with the newest.
        after, before: ids of the items that the page follows and ends in front of.

    Raises:
        InvalidRequestError: there is no item of such an id.
    """
    ordered = list(items) if order == "asc" else list(reversed(items))
    begin, end = 0, len(ordered)
    places = {item["id"]: index for index, item in reversed(list(enumerate(ordered)))}
    for name, wanted in (("after", after), ("before", before)):
        if wanted is not None and wanted not in places:
            raise InvalidRequestError(name, wanted, "the id of one of the list's items")
    if after is not None:
        begin = places[after] + 1
    if before is not None:
        end = max(begin, places[before])
    data = ordered[begin : min(end, begin + limit)]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": begin + len(data) < end,
    }
