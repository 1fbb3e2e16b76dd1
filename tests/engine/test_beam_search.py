"""Beam search: beams are scored by the model's own log-probabilities, and the best come first."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from octavo import BeamSearchParams, InvalidRequestError, SamplingParams
from octavo.engine.beam_search import BeamSearch
from octavo.engine.output.outputs import Logprob

EOS = 1


@pytest.fixture(scope="module")
def llm(tiny_model: Any) -> Any:
    from octavo import LLM

    llm = LLM(
        str(tiny_model), progress=False, max_num_seqs=8, max_num_batched_tokens=64,
        fail_on_compile=True, warm_up="coarse",
    )  # fmt: skip
    yield llm
    llm.engine.check_integrity()
    llm.close()


def test_one_beam_is_the_greedy_text(llm: Any) -> None:
    params = BeamSearchParams(beam_width=1, max_tokens=9, ignore_eos=True)
    outputs = llm.beam_search(["hello", [40, 41, 42]], params)
    greedy = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=1)
    for output, expected in zip(
        outputs, llm.generate(["hello", [40, 41, 42]], greedy, use_tqdm=False), strict=True
    ):
        [beam] = output.sequences
        completion = expected.outputs[0]
        assert beam.tokens == [*expected.prompt_token_ids, *completion.token_ids]
        assert beam.cum_logprob == pytest.approx(completion.cumulative_logprob, abs=1e-4)
        assert (beam.finish_reason, beam.stop_reason) == ("length", None)
        assert beam.text == llm.tokenizer.decode(beam.tokens, skip_special_tokens=False)


@pytest.mark.parametrize("concurrency_limit", [None, 1, 2])
def test_beams_are_worth_what_the_model_says_of_their_texts(
    llm: Any, concurrency_limit: int | None
) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=6)
    prompts = ["the quick", "brown", "x" * 40]
    outputs = llm.beam_search(prompts, params, concurrency_limit=concurrency_limit)
    for prompt, output in zip(prompts, outputs, strict=True):
        num_prompt = len(llm.tokenizer.encode(prompt))
        assert len(output.sequences) == 4
        assert len({tuple(beam.tokens) for beam in output.sequences}) == 4
        scores = [params.score(beam, {EOS}) for beam in output.sequences]
        assert scores == sorted(scores, reverse=True)
        read = SamplingParams(max_tokens=1, prompt_logprobs=0)
        texts = [beam.tokens for beam in output.sequences]
        for beam, again in zip(
            output.sequences, llm.generate(texts, read, use_tqdm=False), strict=True
        ):
            scored = again.prompt_logprobs[num_prompt:]
            total = sum(
                entry[token].logprob
                for entry, token in zip(scored, beam.tokens[num_prompt:], strict=True)
            )
            assert beam.cum_logprob == pytest.approx(total, abs=1e-3)
            assert len(beam.logprobs) == len(beam.tokens) - num_prompt
    # A search of more beams finds texts that are at least as likely.
    [wider] = llm.beam_search(prompts[0], BeamSearchParams(beam_width=8, max_tokens=6))
    assert (
        params.score(wider.sequences[0], {EOS})
        >= params.score(outputs[0].sequences[0], {EOS}) - 1e-4
    )


def output_of(*logprobs: tuple[int, float]) -> Any:
    """A round's answer to one beam: tokens and their log-probabilities, the likeliest first."""
    found = {token: Logprob(value, rank) for rank, (token, value) in enumerate(logprobs, 1)}
    return SimpleNamespace(outputs=[SimpleNamespace(logprobs=[found])], error=None)


class Letters:
    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(map(str, tokens))


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_beams_end_at_the_end_of_sequence_unless_it_is_ignored(ignore_eos: bool) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=2, ignore_eos=ignore_eos)
    search = BeamSearch(params, [7], (EOS,))
    search.extend([output_of((EOS, -0.1), (5, -1.0), (6, -2.0), (4, -9.0))])
    assert len(search.open) == 2
    search.extend([output_of((5, -1.0)), output_of((5, -3.0))])
    best, second = search.result(Letters()).sequences
    if ignore_eos:
        assert [best.tokens, second.tokens] == [[7, EOS, 5], [7, 5, 5]]
        assert best.finish_reason == "length"
    else:  # the end of sequence is no part of a score's length
        assert [best.tokens, second.tokens] == [[7, EOS], [7, 5, 5]]
        assert (best.finish_reason, best.stop_reason) == ("stop", EOS)
        assert params.score(best, {EOS}) == pytest.approx(-0.1)
        assert params.score(second, {EOS}) == pytest.approx(-2.0 / 3)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: BeamSearchParams(beam_width=0, max_tokens=1), "beam_width"),
        (lambda: BeamSearchParams(beam_width=11, max_tokens=1), "beam_width"),
        (lambda: BeamSearchParams(beam_width=True, max_tokens=1), "beam_width"),
        (lambda: BeamSearchParams(beam_width=1, max_tokens=0), "max_tokens"),
        (lambda: BeamSearchParams(beam_width=1, max_tokens=1, temperature=1.0), "temperature"),
        (
            lambda: BeamSearchParams(beam_width=1, max_tokens=1, include_stop_str_in_output=True),
            "include_stop_str_in_output",
        ),
    ],
)
def test_parameters_out_of_range_are_refused(make: Callable[[], Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        make()
    assert caught.value.field == field


def test_what_can_never_be_searched_is_refused_before_anything_runs(llm: Any) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=510)
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        llm.beam_search("abc", params)
    with pytest.raises(InvalidRequestError, match="concurrency_limit"):
        llm.beam_search("abc", BeamSearchParams(beam_width=1, max_tokens=1), concurrency_limit=0)
    with pytest.raises(InvalidRequestError, match="params"):
        llm.beam_search("abc", SamplingParams())
    assert llm.beam_search([], BeamSearchParams(beam_width=1, max_tokens=1)) == []


def test_metrics_are_typed_and_of_the_moment(llm: Any) -> None:
    from octavo.engine.observability.metrics import Counter, Gauge, Histogram

    def found() -> dict[str, Any]:
        return {metric.name: metric for metric in llm.get_metrics() if not metric.labels}

    before = found()["octavo:generation_tokens"]
    llm.generate("x", SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
    after = found()
    assert isinstance(before, Counter)
    assert after["octavo:generation_tokens"].value == before.value + 5
    assert isinstance(after["octavo:num_requests_running"], Gauge)
    steps = after["octavo:iteration_tokens_total"]
    assert isinstance(steps, Histogram)
    assert steps.count == steps.buckets["+Inf"] == llm.engine.load().num_steps
    kinds = [m.labels for m in llm.get_metrics() if m.name == "octavo:preemptions"]
    assert kinds == [{"kind": "swap"}, {"kind": "recompute"}]


def test_a_reset_prefix_cache_holds_nothing(llm: Any) -> None:
    params = SamplingParams(max_tokens=1)
    llm.generate("y" * 100, params, use_tqdm=False)
    assert llm.generate("y" * 100, params, use_tqdm=False)[0].num_cached_tokens > 0
    assert llm.reset_prefix_cache() is True
    assert llm.generate("y" * 100, params, use_tqdm=False)[0].num_cached_tokens == 0
