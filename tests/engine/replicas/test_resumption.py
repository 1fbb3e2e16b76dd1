"""One engine goes on where another stopped, at any token and with any sampling parameters, and its
reader has what one engine alone would have told."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from octavo.engine.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.errors import InvalidRequestError
from octavo.engine.input.input_processor import Submission
from octavo.engine.input.resumption import rest_of
from octavo.engine.replicas.continuation import Narrator, transcript_of
from octavo.engine.sampling_params import RequestOutputKind, SamplingParams
from tests.engine.test_sampling_combinations import requests

NUM_EXAMPLES = 10
"""With the profile of CI; others take a share of their own number."""

ENGINES: dict[str, dict[str, Any]] = {
    "several steps a dispatch": {"num_decode_steps": 3},
    "short of pages": {
        "scheduling_policy": "priority", "num_kv_pages": 18, "watermark": 0.0, "overlap": False,
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[Engine]:
    arguments: dict[str, Any] = {
        "model": str(tiny_model), "max_num_seqs": 4, "block_size": 8, "warm_up": "coarse",
        "max_num_batched_tokens": 32, "max_model_len": 96, "num_kv_pages": 64,
    }  # fmt: skip
    engine = Engine(EngineConfig(**arguments | ENGINES[request.param]))
    yield engine
    engine.close()


def serve(
    engine: Engine, blobs: Sequence[bytes], cuts: Sequence[int]
) -> tuple[list[Narrator], int]:
    """What readers have of submissions that are taken from the engine after so many turns in all,
    and given to it again.

    Returns:
        Their transcripts, and how many completions went on from tokens of before.
    """
    narrators = [Narrator(transcript_of(pickle.loads(blob))) for blob in blobs]
    by_id = {each.transcript.engine_id: each for each in narrators}
    num_resumed = 0

    def give() -> None:
        nonlocal num_resumed
        for blob, narrator in zip(blobs, narrators, strict=True):
            if not narrator.transcript.finished:
                generated = narrator.generated()
                num_resumed += sum(bool(each.token_ids) for each in generated)
                submission: Submission = pickle.loads(blob)
                for each in submission.sequences:  # as the process that readers belong to has them
                    each.metrics = narrator.transcript.sequences[0].request.metrics
                grammar = engine.inputs.grammar_of(submission.params)  # one cannot be sent
                engine.submit(replace(rest_of(submission, generated), grammar=grammar))

    give()
    turn = 0
    while engine.has_unfinished:
        for transcript in engine.advance():
            while transcript.has_news:
                by_id[transcript.engine_id].take(pickle.loads(pickle.dumps(transcript.read())))
                if not transcript.finished:
                    break
        turn += 1
        if turn in cuts:
            engine.abort_all()
            engine.scheduler.check_integrity()
            give()
    return narrators, num_resumed


def told(narrator: Narrator) -> list[Any]:
    """What must be the same: tokens, texts and ends."""
    return [
        (each.token_ids, each.text, each.finish_reason, each.stop_reason)
        for each in narrator.transcript.sequences
    ]


def test_a_stream_goes_on_with_what_it_had(engine: Engine) -> None:
    """One case by hand: two completions, of which one may end first, cut after every turn."""
    params = SamplingParams(
        n=2, temperature=0.8, seed=3, max_tokens=12, logprobs=1, stop=["QQ"], min_tokens=4,
        output_kind=RequestOutputKind.DELTA,
    )  # fmt: skip
    submission = engine.inputs.process("it", [5, 6, 7] * 6, params, now_s=engine.clock.now_s())
    blob = pickle.dumps(submission)
    [whole], _ = serve(engine, [blob], ())
    for cut in range(1, 30):
        [parts], num_resumed = serve(engine, [blob], [cut])
        assert told(parts) == told(whole)
        if num_resumed == 2:
            break
    else:
        pytest.fail("nothing went on")


@settings(
    max_examples=max(NUM_EXAMPLES, settings().max_examples // 8),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(drawn=requests, cuts=st.lists(st.integers(1, 30), min_size=1, max_size=4))
def test_a_reader_notices_nothing(engine: Engine, drawn: list[Any], cuts: list[int]) -> None:
    blobs = []
    for index, (prompt, fields, priority, _) in enumerate(drawn):
        try:
            params = SamplingParams(**fields | {"output_kind": RequestOutputKind.DELTA})
            submission = engine.inputs.process(
                f"r{index}", prompt, params, now_s=engine.clock.now_s(), priority=priority,
                compile_grammar=False,
            )  # fmt: skip
            engine.inputs.grammar_of(params)
        except InvalidRequestError:
            continue
        blobs.append(pickle.dumps(submission))
    whole, _ = serve(engine, blobs, ())
    parts, num_resumed = serve(engine, blobs, cuts)
    event(f"completions that went on: {min(num_resumed, 3)}")
    for one, other in zip(whole, parts, strict=True):
        assert told(one) == told(other)
        assert one.transcript.finished
        assert other.transcript.finished
        for before, after in zip(one.transcript.sequences, other.transcript.sequences, strict=True):
            assert (before.logprobs is None) == (after.logprobs is None)
            if before.logprobs is not None and after.logprobs is not None:
                assert len(before.logprobs) == len(after.logprobs) == len(after.token_ids)
                assert after.cumulative_logprob == pytest.approx(
                    before.cumulative_logprob, abs=1e-3
                )
        scores, again = one.transcript.prompt_logprobs, other.transcript.prompt_logprobs
        assert (scores is None) == (again is None)
        if scores is not None and again is not None:
            assert len(scores) == len(again)
