"""A prefix cache's batches of events as smg reads them."""

from __future__ import annotations

from octavo.engine.kv.cache_events import CacheEvent, PagesRemoved, PagesStored
from octavo.engine.kv.page_hash import PageHash
from octavo.server.cache_feed import Batch
from octavo.server.proto.smg import common_pb2 as pb


def batch_message(batch: Batch, page_size: int) -> pb.KvEventBatch:
    """The message of a batch.

    Args:
        page_size: tokens in a page.
    """
    message = pb.KvEventBatch(
        sequence_number=batch.number,
        timestamp=batch.unix_s,
        events=[
            _event(event, page_size, number) for number, event in enumerate(batch.events, start=1)
        ],
    )
    if (part := batch.part) is not None:
        message.snapshot.CopyFrom(
            pb.KvSnapshotChunk(index=part.index, count=part.count, blocks=part.num_pages)
        )
    return message


def _event(event: CacheEvent, page_size: int, number: int) -> pb.KvCacheEvent:
    message = pb.KvCacheEvent(event_id=number)
    if isinstance(event, PagesStored):
        for index, name in enumerate(event.names):
            message.stored.blocks.add(
                block_hash=_number(name),
                token_ids=event.token_ids[index * page_size : (index + 1) * page_size],
                block_size=page_size,
            )
        if event.parent is not None:
            message.stored.parent_block_hash = _number(event.parent)
    elif isinstance(event, PagesRemoved):
        message.removed.block_hashes.extend(map(_number, event.names))
    else:
        message.cleared.SetInParent()
    return message


def _number(name: PageHash) -> int:
    """Half of a page's name: smg's field has 64 bits."""
    return int.from_bytes(name[:8], "little", signed=True)
