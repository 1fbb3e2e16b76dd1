"""A request goes on at another engine with the pages that the first one computed."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.errors import InvalidRequestError
from octavo.engine.input.input_processor import Submission
from octavo.engine.input.resumption import rest_of
from octavo.engine.kv_transfer.page_batch import PageBatch
from octavo.engine.observability.event_log import start_log
from octavo.engine.replicas.continuation import Narrator, transcript_of
from octavo.engine.sampling_params import RequestOutputKind, SamplingParams
from octavo.engine.simulation.replay import replay

PAGE = 8
PARAMS = SamplingParams(
    temperature=0.8, seed=7, max_tokens=40, ignore_eos=True, output_kind=RequestOutputKind.DELTA
)
PROMPT = [17 + index % 200 for index in range(61)]


def make_engine(model: Path, **changed: Any) -> Engine:
    arguments: dict[str, Any] = {
        "model": str(model), "max_num_seqs": 4, "block_size": PAGE, "warm_up": "coarse",
        "max_num_batched_tokens": 32, "max_model_len": 160, "num_kv_pages": 80,
        "host_kv_memory_bytes": 4 << 20,
    }  # fmt: skip
    return Engine(EngineConfig(**arguments | changed))


@pytest.fixture(scope="module", params=["tiny_model", "tiny_latents"])
def model(request: pytest.FixtureRequest) -> Path:
    """Of keys and values, and of latents."""
    return Path(request.getfixturevalue(request.param))


@pytest.fixture(scope="module")
def engines(model: Path) -> Iterator[tuple[Engine, Engine]]:
    made = make_engine(model), make_engine(model)
    yield made
    for engine in made:
        engine.close()


@pytest.fixture(autouse=True)
def nothing_is_left(engines: tuple[Engine, Engine]) -> Iterator[None]:
    yield
    for engine in engines:
        engine.abort_all()
        engine.check_integrity()
        engine.flush_prefix_cache()
        assert engine.load().num_free_pages == engine.load().num_total_pages


def submission_of(engine: Engine, prompt: list[int], params: SamplingParams) -> Submission:
    return engine.inputs.process("it", prompt, params, now_s=engine.clock.now_s())


def submit(engine: Engine, submission: Submission) -> None:
    """Submits a copy, as another process has it."""
    engine.submit(pickle.loads(pickle.dumps(submission)))


def advance(engine: Engine, narrator: Narrator, num_tokens: int | None = None) -> None:
    """Turns until the reader has so many tokens, or all there are."""
    transcript = narrator.transcript
    while not transcript.finished and engine.has_unfinished:
        if num_tokens is not None and len(transcript.sequences[0].token_ids) >= num_tokens:
            return
        for each in engine.advance():
            narrator.take(each.read())


def pages_of(engine: Engine, names: list[bytes], narrator: Narrator) -> list[PageBatch]:
    """What the engine gives of these, while it serves."""
    assert engine.transfer is not None
    batches: list[PageBatch] = []
    ends: list[None] = []
    engine.transfer.give(names, lambda it: ends.append(it) if it is None else batches.append(it))
    while not ends:
        for each in engine.advance():
            narrator.take(each.read())
    return batches


@pytest.mark.parametrize("num_told", [1, 9, 20])
def test_it_goes_on_with_the_pages_of_another(
    engines: tuple[Engine, Engine], num_told: int
) -> None:
    first, second = engines
    submission = submission_of(first, PROMPT, PARAMS)
    alone = Narrator(transcript_of(submission))
    submit(first, submission)
    advance(first, alone)
    first.flush_prefix_cache()

    narrator = Narrator(transcript_of(submission))
    submit(first, submission)
    advance(first, narrator, num_told)
    batches = pages_of(first, first.page_names(submission.request_id), narrator)
    assert not narrator.transcript.finished
    transcript = first.release(submission.request_id)
    assert transcript is not None
    if transcript.has_news:
        narrator.take(transcript.read())
    assert first.release(submission.request_id) is None
    num_known = len(PROMPT) + len(narrator.transcript.sequences[0].token_ids)

    assert second.transfer is not None
    num_taken = sum(map(second.transfer.take, batches))
    second.check_integrity()
    assert num_taken == sum(len(batch.names) for batch in batches)
    assert num_taken >= (len(PROMPT) + num_told - 1) // PAGE, "pages of the output, too"
    assert sum(map(second.transfer.take, batches)) == 0, "it has them already"
    num_before = second.executor.stats.num_tokens
    submit(second, rest_of(submission, narrator.generated()))
    num_decoded = PARAMS.max_tokens - len(narrator.transcript.sequences[0].token_ids)
    advance(second, narrator)
    [told], [whole] = narrator.transcript.sequences, alone.transcript.sequences
    assert (told.token_ids, told.text) == (whole.token_ids, whole.text)
    num_computed = second.executor.stats.num_tokens - num_before
    assert num_computed <= num_known - num_taken * PAGE + num_decoded


def test_pages_that_were_given_up_are_left_out(engines: tuple[Engine, Engine]) -> None:
    first, _ = engines
    submission = submission_of(first, PROMPT, PARAMS)
    narrator = Narrator(transcript_of(submission))
    submit(first, submission)
    advance(first, narrator, 3)
    names = first.page_names(submission.request_id)
    first.release(submission.request_id)
    first.abort_all()
    first.flush_prefix_cache()
    assert pages_of(first, names, narrator) == []


def test_damaged_and_foreign_pages_are_refused(engines: tuple[Engine, Engine]) -> None:
    first, second = engines
    submission = submission_of(first, PROMPT, PARAMS)
    narrator = Narrator(transcript_of(submission))
    submit(first, submission)
    advance(first, narrator, 3)
    [batch, *_] = pages_of(first, first.page_names(submission.request_id), narrator)
    assert second.transfer is not None
    page = batch.contents[0]
    bad: dict[str, dict[str, Any]] = {
        "layout": {"layout": "weights 1, float32, quantization None; 16 tokens; float32[2]"},
        "checksum": {"contents": (page[:-1] + bytes([page[-1] ^ 1]), *batch.contents[1:])},
        "names": {"names": (batch.names[0] + b"\0", *batch.names[1:])},
        "contents": {"contents": batch.contents[1:]},
    }
    for field, change in bad.items():
        with pytest.raises(InvalidRequestError) as caught:
            second.transfer.take(dataclasses.replace(batch, **change))
        assert caught.value.field == field
    with pytest.raises(InvalidRequestError, match=f"{second.executor.page_bytes} bytes each"):
        second.transfer.take(PageBatch.of(batch.layout, batch.names[:1], [b"1234567"]))
    assert second.scheduler.transfers.host_page(batch.names[0]) is None


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantized_pages_move_with_their_scales(
    engines: tuple[Engine, Engine], model: Path, kind: str
) -> None:
    first, second = (make_engine(model, kv_cache_dtype=kind) for _ in range(2))
    submission = submission_of(first, PROMPT, PARAMS)
    alone, narrator = (Narrator(transcript_of(submission)) for _ in range(2))
    submit(first, submission)
    advance(first, alone)
    first.flush_prefix_cache()
    submit(first, submission)
    advance(first, narrator, 9)
    batches = pages_of(first, first.page_names(submission.request_id), narrator)
    transcript = first.release(submission.request_id)
    assert transcript is not None
    if transcript.has_news:
        narrator.take(transcript.read())
    assert second.transfer is not None
    assert sum(map(second.transfer.take, batches)) >= len(PROMPT) // PAGE
    submit(second, rest_of(submission, narrator.generated()))
    advance(second, narrator)
    told, whole = (each.transcript.sequences[0].token_ids for each in (narrator, alone))
    assert told == whole
    # An engine whose pages are of another dtype says so.
    other = engines[0]
    assert other.transfer is not None
    with pytest.raises(InvalidRequestError, match=r"layout = .* is not allowed: 'float32\["):
        other.transfer.take(batches[0])
    first.close()
    second.close()


def test_more_pages_than_the_host_has_room_for(model: Path) -> None:
    """They go in parts, and what has no room is left out; nothing is lost by it."""
    first = make_engine(model)
    page_bytes = first.executor.page_bytes
    second = make_engine(model, host_kv_memory_bytes=5 * page_bytes)
    submission = submission_of(first, PROMPT + PROMPT[:50], PARAMS)
    narrator = Narrator(transcript_of(submission))
    submit(first, submission)
    advance(first, narrator, 2)
    batches = pages_of(first, first.page_names(submission.request_id), narrator)
    assert second.transfer is not None
    assert sum(map(second.transfer.take, batches)) <= 5
    second.check_integrity()
    first.close()
    second.close()


def test_what_moves_is_replayed(model: Path, tmp_path: Path) -> None:
    first, second = make_engine(model), make_engine(model)
    log = tmp_path / "log.jsonl"
    with start_log(second.core, second.config, log):
        for round_ in range(3):
            submission = submission_of(first, [*PROMPT, round_], PARAMS)
            narrator = Narrator(transcript_of(submission))
            submit(first, submission)
            advance(first, narrator, 4)
            assert second.transfer is not None
            for batch in pages_of(first, first.page_names(submission.request_id), narrator):
                second.transfer.take(batch)
            transcript = first.release(submission.request_id)
            assert transcript is not None
            if transcript.has_news:
                narrator.take(transcript.read())
            rest = rest_of(submission, narrator.generated())
            submit(second, rest)
            advance(second, narrator, 10)
            assert pages_of(second, second.page_names(submission.request_id), narrator)
            advance(second, narrator)
    found = replay(log)
    assert found.difference is None, found.difference
    first.close()
    second.close()
