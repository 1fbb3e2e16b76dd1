"""Moves where they are hard: pages that are not full, scores, stop strings, no room."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import Any

import pytest

from octavo.engine.engine import Engine
from octavo.engine.replicas import messages
from octavo.engine.replicas.replicated_engine import ReplicatedEngine
from octavo.engine.replicas.worker import Inbox, Worker
from octavo.engine.sampling_params import SamplingParams
from tests.engine.replicas.conftest import ARGUMENTS
from tests.engine.replicas.test_moves import LONG, WAIT_S, Reader

LOGPROB_ATOL = 1e-3
"""Of tokens that another program computed: logits of these weights are up to 35."""
PROMPT = "so it went on and on"


def alone_says(alone: Engine, prompts: list[Any], params: list[SamplingParams]) -> Reader:
    reader = Reader(alone)
    reader.submit(prompts, params)
    reader.read_all()
    return reader


def move_after(
    pair: ReplicatedEngine, prompt: Any, params: SamplingParams, *num_tokens: int
) -> Reader:
    """Reads a request that is moved each time that its reader has so many tokens."""
    reader, left, end_s = Reader(pair), list(num_tokens), time.monotonic() + WAIT_S
    reader.submit([prompt], [params])
    [request_id] = reader.ids
    while pair.has_unfinished:
        assert time.monotonic() < end_s
        reader.read()
        told = sum(len(each.outputs[0].token_ids) for each in reader.outputs[request_id])
        where = pair.where(request_id)
        if left and told >= left[0] and where is not None:
            left = left[1:] if pair.move(request_id, 1 - where.index) else left
    return reader


@pytest.mark.parametrize("waits", [True, False], ids=["at a page's end", "at once"])
def test_a_request_leaves_with_all_its_pages(alone: Engine, waits: bool) -> None:
    """Released at any moment: where it may wait, with as few tokens in no full page as one dispatch
    has steps."""
    inbox, told = Inbox(), SimpleQueue[messages.Message]()
    worker = Worker(alone, inbox, type("", (), {"tell": staticmethod(told.put)}))  # type: ignore[arg-type]
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        for number in range(8):
            params = LONG.replace(seed=number)
            submission = alone.inputs.process("it", [7] * (20 + number), params, now_s=0.0)
            inbox.put(messages.Submit(submission))
            request_id, tokens, names, is_back = submission.request_id, 0, set[bytes](), False
            while not is_back:
                match told.get(timeout=WAIT_S):
                    case messages.News([output]):
                        if not tokens:
                            inbox.put(messages.Release(request_id, waits=waits))
                        tokens += len(output.outputs[0].token_ids)
                        assert not output.finished
                    case messages.PagesGiven(_, batch):
                        assert batch is not None, "what ends it is that it is returned"
                        names.update(batch.names)
                    case messages.Returned(name):
                        assert name == request_id
                        is_back = True
            num_computed = 20 + number + tokens - 1
            if waits:
                assert num_computed % ARGUMENTS["block_size"] < ARGUMENTS["num_decode_steps"]
            # A step in flight computes the last token; a page that it fills is given after it.
            num_full = {n // ARGUMENTS["block_size"] for n in (num_computed, num_computed + 1)}
            assert len(names) in num_full
    finally:
        inbox.close()
        thread.join()


@pytest.mark.parametrize("num_prompt", [1, 16, 17, 300], ids=lambda n: f"{n} tokens")
def test_short_and_long_contexts_move_twice(
    alone: Engine, pair: ReplicatedEngine, num_prompt: int
) -> None:
    prompt = [5 + n % 90 for n in range(num_prompt)]
    before = pair.moves.num_moves
    reader = move_after(pair, prompt, LONG, 1, 60)
    assert reader.told() == alone_says(alone, [prompt], [LONG]).told()
    assert pair.moves.num_moves == before + 2


def test_scores_of_tokens_come_along(alone: Engine, pair: ReplicatedEngine) -> None:
    params = LONG.replace(logprobs=2, temperature=0.8, seed=4)
    moved = move_after(pair, PROMPT, params, 3, 40, 80)
    [outputs], [wanted] = (
        [*reader.outputs.values()] for reader in (moved, alone_says(alone, [PROMPT], [params]))
    )
    scores, expected = (
        [position for output in each for position in output.outputs[0].logprobs or []]
        for each in (outputs, wanted)
    )
    assert len(scores) == params.max_tokens
    for one, other in zip(scores, expected, strict=True):
        assert one.keys() == other.keys()
        for token, score in one.items():
            assert score.logprob == pytest.approx(other[token].logprob, abs=LOGPROB_ATOL)
    total = wanted[-1].outputs[0].cumulative_logprob
    assert outputs[-1].outputs[0].cumulative_logprob == pytest.approx(total, abs=0.05)


def test_a_stop_string_ends_an_answer_wherever_it_is_cut(
    alone: Engine, pair: ReplicatedEngine
) -> None:
    """The tokens of the string are told to one replica and the other."""
    [(parts, _)] = alone_says(alone, [PROMPT], [LONG]).told()
    text = parts[0][1]
    stop = next(text[at : at + 6] for at in range(40, 80) if text.find(text[at : at + 6]) == at)
    params = LONG.replace(stop=[stop])
    expected = alone_says(alone, [PROMPT], [params])
    [((_, _, reason),)], _ = zip(*expected.told(), strict=True)
    assert reason == "stop"
    num_tokens = sum(len(each.outputs[0].token_ids) for [*each_of] in expected.outputs.values()
                     for each in each_of)  # fmt: skip
    for num_left in range(1, 24, 2):
        moved = move_after(pair, PROMPT, params, max(1, num_tokens - num_left))
        assert moved.told() == expected.told(), num_left


def test_a_request_waits_where_there_is_no_row(alone: Engine, pair: ReplicatedEngine) -> None:
    """The replica that it moves to serves as many as it can already, and others wait there."""
    params = [LONG.replace(seed=n, temperature=0.7) for n in range(2 * ARGUMENTS["max_num_seqs"])]
    prompts = [[9 + n] * 12 for n in range(len(params))]
    expected = alone_says(alone, prompts, params).told()
    reader = Reader(pair)
    reader.submit(prompts, params)
    while not all(reader.outputs.values()):
        reader.read()
    before, num_moved = pair.moves.num_moves, 0
    for request_id in reader.ids:
        where = pair.where(request_id)
        num_moved += where is not None and where.index == 0 and pair.move(request_id, 1)
    reader.read_all()
    assert reader.told() == expected
    assert pair.moves.num_moves == before + num_moved > before
