"""Commands as messages, and back: what the devices of all hosts are told."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.engine.execution.row_inputs import RowInputs
from octavo.engine.hosts.messages import Kind, Message
from octavo.engine.scheduler.step_plan import PageCopy


def step(shape_number: int, vector: NDArray[np.int32], *, is_trial: bool = False) -> Message:
    """Run a program; a trial is no part of the digest."""
    return Message(Kind.STEP, (shape_number, is_trial), (vector,))


def masks(slots: NDArray[np.int32], token_masks: NDArray[np.uint32]) -> Message:
    """Write token masks of slots."""
    return Message(Kind.MASKS, (), (slots, token_masks))


def row(slot: int, inputs: RowInputs) -> Message:
    """Write a slot's vocabulary-sized state, of what it is made of."""
    bias = dict(inputs.logit_bias or {})
    arrays = [
        _ids(inputs.prompt),
        _ids(inputs.output),
        _ids(list(bias)),
        np.array(list(bias.values()), np.float32),
        _ids(inputs.allowed or ()),
        *map(_ids, inputs.bad_words),
    ]
    return Message(Kind.ROW, (slot, inputs.allowed is not None), arrays)


def read_row(message: Message) -> tuple[int, RowInputs]:
    """The slot and inputs of a `row`."""
    slot, has_allowed = message.numbers
    prompt, output, ids, values, allowed, *bad_words = message.arrays
    return slot, RowInputs(
        prompt=prompt.tolist(),
        output=output.tolist(),
        logit_bias=dict(zip(ids.tolist(), values.tolist(), strict=True)) or None,
        allowed=allowed.tolist() if has_allowed else None,
        bad_words=[word.tolist() for word in bad_words],
    )


def copy(page_copy: PageCopy, *, is_in: bool) -> Message:
    """Begin to copy pages to the host tier, or from there."""
    numbers = page_copy.transfer_id, is_in
    pages = _ids(page_copy.device_pages), _ids(page_copy.host_pages)
    return Message(Kind.COPY, numbers, pages)


def read_copy(message: Message) -> tuple[PageCopy, bool]:
    """The copy of a `copy`, and whether it is one in. Whose pages they are is not said."""
    transfer_id, is_in = message.numbers
    device_pages, host_pages = message.arrays
    found = PageCopy(
        transfer_id=transfer_id,
        request_id="",
        device_pages=tuple(device_pages.tolist()),
        host_pages=tuple(host_pages.tolist()),
    )
    return found, bool(is_in)


def _ids(numbers: Sequence[int]) -> NDArray[np.int32]:
    return np.array(numbers, np.int32)


def text(words: str) -> list[NDArray[np.uint8]]:
    """Words as a message's arrays."""
    return [np.frombuffer(words.encode(), np.uint8)]
