"""A request of a model of each kind of cache goes on at another engine: with its pages where these
hold all that there is, else computed again."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.engine.config import EngineConfig
from octavo.engine.errors import InvalidConfigError
from octavo.engine.input.resumption import rest_of
from octavo.engine.replicas.continuation import Narrator, transcript_of
from octavo.engine.replicas.replicated_engine import ReplicatedEngine
from octavo.engine.sampling_params import RequestOutputKind, SamplingParams
from tests.engine.families import write_family
from tests.engine.kv_transfer.test_page_transfer import (
    PROMPT,
    advance,
    make_engine,
    pages_of,
    submission_of,
    submit,
)

GREEDY = SamplingParams(
    temperature=0.0, max_tokens=80, ignore_eos=True, output_kind=RequestOutputKind.DELTA
)


@pytest.mark.parametrize(
    ("family", "moves_pages"), [("gemma 4", True), ("windows", False), ("recurrent", False)]
)
def test_it_says_what_it_says_alone(
    family: str, moves_pages: bool, tmp_path: Path, tiny_model: Path
) -> None:
    model = write_family(family, tmp_path, tiny_model)
    changes = {"num_kv_pages": 200, "max_model_len": 256} | (
        {"host_kv_memory_bytes": 0} if family == "recurrent" else {}
    )
    first, second = make_engine(model, **changes), make_engine(model, **changes)
    prompt = PROMPT + PROMPT[:20]  # a snapshot lies within it
    submission = submission_of(first, prompt, GREEDY)
    alone = Narrator(transcript_of(submission))
    submit(first, submission)
    advance(first, alone)

    for num_told in (1, 20):  # the second time from what is cached
        narrator = Narrator(transcript_of(submission))
        submit(first, submission)
        advance(first, narrator, num_told)
        names = first.page_names(submission.request_id)
        batches = pages_of(first, names, narrator) if first.transfer is not None else []
        transcript = first.release(submission.request_id)
        assert transcript is not None
        if transcript.has_news:
            narrator.take(transcript.read())
        while first.has_unfinished:  # the same submission comes again
            first.advance()
        if second.transfer is not None:
            assert (sum(map(second.transfer.take, batches)) > 0) == moves_pages
        submit(second, rest_of(submission, narrator.generated()))
        advance(second, narrator)
        [told], [whole] = narrator.transcript.sequences, alone.transcript.sequences
        assert (told.token_ids, told.text) == (whole.token_ids, whole.text)
    for engine in (first, second):
        engine.check_integrity()
        engine.close()


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("windows", r"replica_roles.*sliding windows"),
        ("recurrent", r"host_kv_memory_bytes.*recurrent layers"),
    ],
)
def test_prompts_apart_are_refused_where_pages_do_not_hold_all(
    family: str, words: str, tmp_path: Path, tiny_model: Path
) -> None:
    config = EngineConfig(
        model=str(write_family(family, tmp_path, tiny_model)),
        data_parallel_size=2,
        replica_roles="prefill, decode",
        host_kv_memory_bytes=8 << 20,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        warm_up="coarse",
    )
    with pytest.raises(InvalidConfigError, match=words):
        ReplicatedEngine(config)
