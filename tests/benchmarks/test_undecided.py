"""Whether a model could have said a token: that of an engine always, another one hardly ever."""

from __future__ import annotations

import math

import pytest

from benchmarks.undecided import TIE, PlainModel
from octavo.engine.llm import LLM
from octavo.engine.sampling_params import SamplingParams
from tests.engine.conftest import write_tiny_model

PROMPT = [5, 80, 200, 31, 6]
NUM_TOKENS = 40
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
PARAMS = {"greedy": GREEDY, "drawn": GREEDY.replace(temperature=0.9, seed=1 << 40)}
Said = tuple[PlainModel, SamplingParams, list[int]]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Said]:
    """What an engine says."""
    model = write_tiny_model(tmp_path_factory.mktemp("tiny_llama"))
    llm = LLM(str(model), max_num_seqs=2, warm_up="coarse", progress=False)
    outputs = llm.generate([PROMPT] * len(PARAMS), [*PARAMS.values()], use_tqdm=False)
    llm.close()
    plain = PlainModel(model, len(PROMPT) + NUM_TOKENS + 1)
    return {
        name: (plain, params, output.outputs[0].token_ids)
        for (name, params), output in zip(PARAMS.items(), outputs, strict=True)
    }


@pytest.fixture(params=PARAMS)
def said(request: pytest.FixtureRequest, answers: dict[str, Said]) -> Said:
    return answers[request.param]


def test_an_engines_tokens_are_what_the_model_says(said: Said) -> None:
    plain, params, tokens = said
    for at, token in enumerate(tokens):
        assert plain.gap([*PROMPT, *tokens[:at]], params, token) < TIE


def test_answers_that_part_elsewhere_than_at_a_tie_are_told_apart(said: Said) -> None:
    """A token that is lost, doubled or another."""
    plain, params, tokens = said
    assert plain.parting(PROMPT, params, tokens, tokens) == 0.0
    assert plain.parting(PROMPT, params, tokens, tokens[:-1]) == math.inf
    wrong = [
        answer
        for at in range(3, NUM_TOKENS, 6)
        for answer in (
            tokens[:at] + tokens[at + 1 :],
            tokens[: at + 1] + tokens[at:],
            [*tokens[:at], (tokens[at] + 1) % 256, *tokens[at + 1 :]],
        )
    ]
    found = [plain.parting(PROMPT, params, tokens, answer) for answer in wrong]
    assert min(found) > TIE
