"""A request that comes to forbid every token ends there, typed, and nobody hears of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.errors import InvalidRequestError, NothingAllowedError
from octavo.engine.input import input_processor
from octavo.engine.sampling_params import RequestOutputKind, SamplingParams

A = 16 + 65 - 33
"""The token of "A"."""
EOS = 1
NEIGHBOURS = {
    f"neighbour {index}": (
        list(range(30 + 9 * index, 60 + 9 * index)),
        SamplingParams(max_tokens=20, ignore_eos=True, **more),
    )
    for index, more in enumerate(
        ({"temperature": 0.0}, {"temperature": 0.0, "logprobs": 2}, {"temperature": 0.9, "seed": 4})
    )
}
SETTINGS = {
    "overlapped": {"num_decode_steps": 1},
    "one step at a time": {"num_decode_steps": 1, "overlap": False},
    "several steps a dispatch": {"num_decode_steps": 4},
}
AT_THE_DOOR: dict[str, dict[str, Any]] = {
    "only stop tokens before min_tokens": {
        "allowed_token_ids": [0], "stop_token_ids": [0], "min_tokens": 3,
    },
    "only the model's own": {"allowed_token_ids": [EOS], "min_tokens": 1},
    "only bad words": {"allowed_token_ids": [A], "bad_words": ["A"]},
    "only stop tokens and bad words": {
        "allowed_token_ids": [A, A + 1, EOS], "bad_words": ["A", "B"], "min_tokens": 2,
    },
}  # fmt: skip
LATER: dict[str, tuple[dict[str, Any], list[int]]] = {
    "a bad word of two tokens": ({"allowed_token_ids": [A], "bad_words": ["AA"]}, [A]),
    "a bad word of three": ({"allowed_token_ids": [A], "bad_words": ["AAA"]}, [A, A]),
    "a bad word, and stops may not come yet": (
        {"allowed_token_ids": [A, EOS], "bad_words": ["AAAAA"], "min_tokens": 9}, [A] * 4,
    ),
    "biased as far as can be": (
        {"allowed_token_ids": [A], "bad_words": ["AA"], "logit_bias": {A: -100.0}}, [A],
    ),
    "penalized": (
        {"allowed_token_ids": [A], "bad_words": ["AAA"], "repetition_penalty": 1.5,
         "presence_penalty": 2.0}, [A, A],
    ),
    "with scores": (
        {"allowed_token_ids": [A], "bad_words": ["AA"], "logprobs": 3, "prompt_logprobs": 1}, [A],
    ),
}  # fmt: skip
DRAWN: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.0, "seed": 3},
    "drawn from few": {"temperature": 0.7, "seed": 3, "top_k": 4, "top_p": 0.5, "min_p": 0.1},
}


@pytest.fixture(scope="module", params=SETTINGS)
def built(tiny_model: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    from octavo.engine.config import EngineConfig
    from octavo.engine.engine import Engine

    engine = Engine(
        EngineConfig(
            model=str(tiny_model), max_num_seqs=8, max_num_batched_tokens=64, block_size=8,
            fail_on_compile=True, warm_up="coarse", **SETTINGS[request.param],
        )
    )  # fmt: skip
    yield engine
    engine.close()


@pytest.fixture
def engine(built: Any) -> Iterator[Any]:
    """The engine; nobody may have had to start over, and all must be given back."""
    yield built
    assert not built.has_unfinished
    assert (built.core.recovery.num_recoveries, built.core.num_bugs) == (0, 0)
    built.check_integrity()
    load = built.load()
    assert load.num_free_pages == load.num_total_pages


def run(engine: Any, given: dict[str, tuple[list[int], SamplingParams]]) -> dict[str, Any]:
    """Last outputs."""
    for name, (prompt, params) in given.items():
        engine.submit(engine.inputs.process(name, prompt, params, now_s=engine.clock.now_s()))
    last: dict[str, Any] = {}
    while engine.has_unfinished:
        for output in engine.step():
            assert output.request_id not in last or not last[output.request_id].finished
            last[output.request_id] = output
    return last


def tokens(outputs: dict[str, Any]) -> dict[str, list[int]]:
    return {name: list(output.outputs[0].token_ids) for name, output in outputs.items()}


@pytest.fixture(scope="module")
def undisturbed(built: Any) -> dict[str, list[int]]:
    return tokens(run(built, NEIGHBOURS))


@pytest.mark.parametrize("drawn", DRAWN)
@pytest.mark.parametrize("case", LATER)
def test_it_ends_alone_with_the_tokens_that_were_allowed(
    engine: Any, undisturbed: dict[str, list[int]], case: str, drawn: str
) -> None:
    fields, said = LATER[case]
    params = SamplingParams(max_tokens=30, **fields, **DRAWN[drawn])
    outputs = run(engine, {**NEIGHBOURS, "barred": (list(range(90, 120)), params)})
    barred = outputs.pop("barred")
    assert isinstance(barred.error, NothingAllowedError)
    assert "allowed_token_ids with bad_words" in str(barred.error)
    assert f"no token after {len(said)} generated" in str(barred.error)
    assert barred.outputs[0].finish_reason == "failed"
    assert list(barred.outputs[0].token_ids) == said
    assert tokens(outputs) == undisturbed
    if params.logprobs is not None:
        assert len(barred.outputs[0].logprobs) == len(said)
        assert len(barred.prompt_logprobs) == 30


@pytest.mark.parametrize("case", LATER)
def test_deltas_end_with_it_whatever_came_in_the_same_turn(engine: Any, case: str) -> None:
    """Of all that a turn of the engine made, steps are told at once: nobody asks a second time."""
    fields, said = LATER[case]
    params = SamplingParams(
        max_tokens=30, temperature=0.0, output_kind=RequestOutputKind.DELTA, **fields
    )
    engine.submit(engine.inputs.process("barred", [90], params, now_s=engine.clock.now_s()))
    given = []
    while engine.has_unfinished:
        given += engine.step()
    assert [token for output in given for token in output.outputs[0].token_ids] == said
    assert [output.finished for output in given] == [False] * (len(given) - 1) + [True]
    assert isinstance(given[-1].error, NothingAllowedError)


def test_prefixes_stay_cached_and_a_varied_prompt_is_served_alike(engine: Any) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=9, allowed_token_ids=[A], bad_words=["AA"])
    common = list(range(150, 182))
    for last in range(3):
        error = run(engine, {"barred": ([*common, 20 + last], params)})["barred"].error
        assert isinstance(error, NothingAllowedError)
    good = run(engine, {"good": ([*common, 40], SamplingParams(temperature=0.0))})["good"]
    assert good.error is None
    assert good.num_cached_tokens == len(common)


@pytest.mark.parametrize("drawn", DRAWN)
@pytest.mark.parametrize("case", AT_THE_DOOR)
def test_what_the_door_refuses_would_end_alone_too(
    engine: Any,
    undisturbed: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    drawn: str,
) -> None:
    params = SamplingParams(max_tokens=30, **AT_THE_DOOR[case], **DRAWN[drawn])
    with pytest.raises(InvalidRequestError, match=r"allowed_token_ids = .* at least one token"):
        engine.inputs.process("refused", [50, 51], params, now_s=0.0)
    monkeypatch.setattr(input_processor, "_check_stops", lambda *args: None)
    outputs = run(engine, {"barred": ([90, 91], params), **NEIGHBOURS})
    barred = outputs.pop("barred")
    assert isinstance(barred.error, NothingAllowedError)
    assert not barred.outputs[0].token_ids
    assert tokens(outputs) == undisturbed


def test_every_completion_of_a_prompt_ends(engine: Any) -> None:
    params = SamplingParams(n=3, max_tokens=9, allowed_token_ids=[A], bad_words=["AA"])
    output = run(engine, {"barred": ([90, 91], params)})["barred"]
    assert isinstance(output.error, NothingAllowedError)
    assert [each.finish_reason for each in output.outputs] == ["failed"] * 3


def test_a_text_that_was_over_before_is_no_failure(engine: Any) -> None:
    """However many steps a dispatch takes: the stop string came first."""
    params = SamplingParams(
        temperature=0.0, max_tokens=9, allowed_token_ids=[A], bad_words=["AAAA"], stop="AA"
    )
    output = run(engine, {"stopped": ([90, 91], params)})["stopped"]
    assert output.error is None
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "AA")


def test_a_stop_token_counts_from_min_tokens_on_and_not_before(engine: Any) -> None:
    """Its ban is lifted where it begins to count."""
    params = SamplingParams(
        temperature=0.0, max_tokens=9, min_tokens=4, allowed_token_ids=[A, EOS],
        logit_bias={EOS: 100.0},
    )  # fmt: skip
    output = run(engine, {"stopped": ([90, 91], params)})["stopped"]
    assert list(output.outputs[0].token_ids) == [A] * 4 + [EOS]
    assert output.outputs[0].finish_reason == "stop"


def test_more_stop_tokens_than_a_row_holds_are_refused(engine: Any) -> None:
    wrong = SamplingParams(stop_token_ids=list(range(20, 36)))
    inputs = engine.inputs
    eos = tuple(range(100, 109))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "_eos_token_ids", eos)
        with pytest.raises(InvalidRequestError, match="at most 15 besides the model's own"):
            inputs.process("refused", [50], wrong, now_s=0.0)
        # Named twice is named once, and who does not stop at the model's own may name as many.
        for params in (
            SamplingParams(stop_token_ids=[*range(20, 35), 100]),
            wrong.replace(ignore_eos=True),
        ):
            assert inputs.process("taken", [50], params, now_s=0.0).sequences
