"""Log-probabilities of prompts over HTTP: the Python API's, in OpenAI's and vLLM's shapes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo import LLM, SamplingParams
from octavo.server.http import answers
from octavo.server.http.errors import encode, encode_long

PROMPTS = ["abcabcabc", "häuser 漢字", "x" * 150]
"""One of parts of characters, one of several chunks."""
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def http(live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.http, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def wanted(tiny_model: Path) -> dict[str, Any]:
    """Outputs of the Python API by prompt."""
    llm = LLM(
        str(tiny_model), progress=False, max_num_seqs=4, max_num_batched_tokens=64,
        max_model_len=512, num_kv_pages=100, warm_up="coarse",
    )  # fmt: skip
    params = SamplingParams(max_tokens=3, prompt_logprobs=2, logprobs=2, **GREEDY)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    llm.close()
    return dict(zip(PROMPTS, outputs, strict=True))


def complete(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = http.post("/v1/completions", json=GREEDY | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(http: httpx.Client, route: str, **fields: Any) -> list[dict[str, Any]]:
    lines = http.post(route, json=GREEDY | {"stream": True} | fields).text.splitlines()
    assert lines[-2] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-2] if line]


def refused(http: httpx.Client, route: str, **fields: Any) -> str:
    answer = http.post(route, json=GREEDY | fields)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["param"]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_an_echo_with_logprobs_has_those_of_the_prompt_first(http, wanted, prompt, max_tokens):
    output = wanted[prompt]
    ids = output.prompt_token_ids
    for given in (prompt, ids):
        answer = complete(http, prompt=given, echo=True, logprobs=1, max_tokens=max_tokens)
        [choice] = answer["choices"]
        scores = choice["logprobs"]
        assert {len(column) for column in scores.values()} == {len(ids) + max_tokens}
        assert (scores["token_logprobs"][0], scores["top_logprobs"][0]) == (None, None)
        entries = [*output.prompt_logprobs, *output.outputs[0].logprobs]
        all_ids = [*ids, *output.outputs[0].token_ids]
        for place in range(1, len(ids) + max_tokens):
            entry, score = entries[place], scores["token_logprobs"][place]
            assert score == pytest.approx(entry[all_ids[place]].logprob, abs=1e-4)
            top = scores["top_logprobs"][place]
            best = max(entry.values(), key=lambda item: item.logprob)
            assert 1 <= len(top) <= 2
            assert max(top.values()) == pytest.approx(best.logprob, abs=1e-4)
            assert scores["tokens"][place] in top
        assert choice["text"].startswith(prompt)
        assert choice["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == max_tokens
        assert (choice["text"] == prompt) is (max_tokens == 0)


def test_offsets_are_places_in_the_text(http):
    [choice] = complete(http, prompt="aé漢z", echo=True, logprobs=0, max_tokens=0)["choices"]
    scores = choice["logprobs"]
    assert choice["text"] == "aé漢z"
    # A character of several tokens stands in the text once its last one is there.
    assert scores["text_offset"] == [0, 1, 1, 2, 2, 2, 3]
    assert scores["tokens"][0] == "a"
    assert scores["tokens"][-1] == "z"


def test_several_prompts_and_completions_each_have_their_own(http, wanted):
    answer = complete(
        http, prompt=PROMPTS[:2], n=2, temperature=1, echo=True, logprobs=1, max_tokens=2
    )
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    for choice in answer["choices"]:
        prompt = PROMPTS[choice["index"] // 2]
        assert choice["text"].startswith(prompt)
        num_prompt = len(wanted[prompt].prompt_token_ids)
        assert len(choice["logprobs"]["tokens"]) == num_prompt + 2
    assert answer["choices"][0]["logprobs"]["tokens"] == (
        answer["choices"][1]["logprobs"]["tokens"][:9]
        + answer["choices"][0]["logprobs"]["tokens"][9:]
    )


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_a_stream_adds_up_to_the_same_scores(http, max_tokens):
    ask = {"prompt": PROMPTS[1], "echo": True, "logprobs": 1, "max_tokens": max_tokens, "n": 2}
    ask |= {"temperature": 1, "seed": 3, "return_token_ids": True}
    whole = complete(http, **ask)["choices"]
    text, scores, ids = ["", ""], [{}, {}], [[], []]
    prompt_ids = []
    for part in events(http, "/v1/completions", **ask):
        for choice in part["choices"]:
            index = choice["index"]
            text[index] += choice["text"]
            ids[index] += choice["token_ids"]
            for name, column in (choice["logprobs"] or {}).items():
                scores[index][name] = scores[index].get(name, []) + column
            prompt_ids += [choice["prompt_token_ids"]] if "prompt_token_ids" in choice else []
    for index, choice in enumerate(whole):
        assert text[index] == choice["text"]
        assert scores[index] == choice["logprobs"]
        assert ids[index] == choice["token_ids"]
        assert len(ids[index]) == max_tokens
    assert prompt_ids == [choice["prompt_token_ids"] for choice in whole]


def test_prompt_logprobs_stand_in_a_field_of_their_own(http, wanted):
    output = wanted[PROMPTS[0]]
    ids = output.prompt_token_ids
    [choice] = complete(http, prompt=ids, prompt_logprobs=2, max_tokens=1)["choices"]
    message = [{"role": "user", "content": "abc"}]
    chat = http.post(
        "/v1/chat/completions",
        json={"messages": message, "prompt_logprobs": 1, "max_tokens": 0, "return_token_ids": True},
    ).json()
    assert choice["logprobs"] is None
    assert choice["text"]
    assert choice["prompt_logprobs"][0] is None
    for entry, known in zip(choice["prompt_logprobs"][1:], output.prompt_logprobs[1:], strict=True):
        assert set(entry) == {str(token) for token in known}
        for token, score in known.items():
            told = entry[str(token)]
            assert told["logprob"] == pytest.approx(score.logprob, abs=1e-4)
            assert (told["rank"], told["decoded_token"]) == (score.rank, score.decoded_token)
    assert len(chat["prompt_logprobs"]) == len(chat["prompt_token_ids"])
    assert chat["choices"][0]["message"]["content"] == ""
    assert chat["choices"][0]["token_ids"] == []
    assert chat["usage"]["completion_tokens"] == 0


def test_a_chats_first_event_names_the_prompts_tokens(http):
    parts = events(
        http, "/v1/chat/completions", messages=[{"role": "user", "content": "abc"}],
        max_tokens=5, return_token_ids=True,
    )  # fmt: skip
    tokenized = http.post("/tokenize", json={"messages": [{"role": "user", "content": "abc"}]})
    assert parts[0]["prompt_token_ids"] == tokenized.json()["tokens"]
    assert all("prompt_token_ids" not in part for part in parts[1:])
    assert sum(len(part["choices"][0]["token_ids"]) for part in parts) == 5


def test_no_tokens_are_for_those_who_ask_of_the_prompt(http):
    chat = {"messages": [{"role": "user", "content": "x"}]}
    assert refused(http, "/v1/completions", prompt="x", max_tokens=0) == "max_tokens"
    assert refused(http, "/v1/chat/completions", max_tokens=0, **chat) == "max_tokens"
    name = "max_completion_tokens"
    assert refused(http, "/v1/chat/completions", **chat, **{name: 0}) == name
    with_echo = {"prompt": "x", "echo": True, "max_tokens": 0}
    assert refused(http, "/v1/completions", **with_echo, min_tokens=1) == "min_tokens"
    streamed = {"prompt": "x", "prompt_logprobs": 1, "stream": True}
    assert refused(http, "/v1/completions", **streamed) == "prompt_logprobs"
    assert refused(http, "/v1/completions", prompt="x", prompt_logprobs=21) == "prompt_logprobs"
    assert complete(http, **with_echo)["choices"][0]["text"] == "x"


def test_an_answer_of_too_many_scores_is_refused(http):
    # 128 prompts of 400 tokens with 20 scores each.
    ask = {"prompt": ["x" * 400] * 128, "echo": True, "logprobs": 20, "max_tokens": 0}
    assert refused(http, "/v1/completions", **ask) == "logprobs"
    assert 128 * 400 * 21 > answers.MAX_SCORES > 8192 * 21


@pytest.mark.parametrize(
    "content",
    [
        {},
        [],
        [{}],
        {"a": [], "b": {"c": None, "ü": "\ud800"}},
        list(range(1000)),
        [{"a": [1.5] * 600}] * 300,
        [[None, {"x": 1}]],
        "text",
    ],
    ids=range(8),
)
def test_json_in_pieces_is_the_same_json(content):
    assert encode_long(content) == encode(content)
