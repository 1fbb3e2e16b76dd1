"""Names for the content of full pages: a page's hash covers every token before it too."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

PageHash = bytes
"""128 bits: two different prefixes do not meet by chance, nor by cheap intent.

Pages of the first cache group are found by the hash itself, those of another group by the hash and
a byte more (`group_names`): one index serves all groups."""

HASH_BYTES = 16


def group_names(hashes: list[PageHash], group: int) -> list[PageHash]:
    """What pages of a cache group with these contents are found by."""
    suffix = bytes((group,))
    return [page_hash + suffix for page_hash in hashes] if group else hashes


def root_hash(tenant: str, salt: str) -> PageHash:
    """The parent of a sequence's first page: sequences share pages only below the same root."""
    tenant_bytes = tenant.encode("utf-8", "surrogatepass")
    prefix = len(tenant_bytes).to_bytes(8, "little")
    data = prefix + tenant_bytes + salt.encode("utf-8", "surrogatepass")
    return blake2b(data, digest_size=HASH_BYTES).digest()


def page_hashes(parent: PageHash, token_ids: Sequence[int], page_size: int) -> list[PageHash]:
    """The hashes of consecutive full pages.

    Args:
        parent: the hash of the page before them, or the root's.
        token_ids: their tokens, a multiple of `page_size`.
    """
    data = array("q", token_ids).tobytes()
    num_bytes = page_size * 8
    hashes: list[PageHash] = []
    for start in range(0, len(data), num_bytes):
        page = data[start : start + num_bytes]
        parent = blake2b(parent + page, digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return hashes
