"""OpenAI's own client against a live server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.waiting import until

WAIT_S = 60
MESSAGES: list[Any] = [{"role": "user", "content": "Say something."}]


@pytest.fixture(scope="module")
def client(live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.http}/v1", api_key="unused", max_retries=0) as client:
        yield client


def load(live) -> dict[str, Any]:
    return httpx.get(f"{live.http}/v1/load").json()


def is_idle(live) -> bool:
    now = load(live)
    return (
        now["num_running"] == now["num_waiting"] == now["num_inflight"] == 0
        and now["num_free_pages"] == now["num_total_pages"]
    )


def test_a_completion_has_text_usage_and_a_reason(client):
    answer = client.completions.create(model="tiny", prompt="abc", max_tokens=5, temperature=0)
    assert answer.object == "text_completion"
    assert answer.model == "tiny"
    [choice] = answer.choices
    assert choice.finish_reason == "length"
    assert choice.text
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 5)
    assert answer.usage.total_tokens == 8


def test_the_default_length_is_sixteen_tokens(client):
    answer = client.completions.create(model="tiny", prompt="abc", extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16


def test_a_stream_adds_up_to_the_whole(client):
    ask = {"model": "tiny", "prompt": "abc", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**ask)
    parts = list(client.completions.create(**ask, stream=True))
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    reasons = [part.choices[0].finish_reason for part in parts]
    assert reasons == [None] * (len(parts) - 1) + ["length"]
    assert {part.usage for part in parts} == {None}


def test_a_stream_tells_its_usage_last_when_asked(client):
    parts = list(
        client.completions.create(
            model="tiny", prompt="abc", max_tokens=7, stream=True,
            stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
        )
    )  # fmt: skip
    assert parts[-1].choices == []
    assert (parts[-1].usage.prompt_tokens, parts[-1].usage.completion_tokens) == (3, 7)


def test_a_stream_tells_its_usage_so_far_with_every_event_when_asked(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    parts = list(
        client.completions.create(
            model="tiny", prompt="abc", max_tokens=7, stream=True,
            stream_options=options, extra_body={"ignore_eos": True},
        )
    )  # fmt: skip
    counts = [part.usage.completion_tokens for part in parts]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-2:] == [7, 7]
    assert {part.usage.prompt_tokens for part in parts} == {3}


def test_several_prompts_and_completions_are_numbered_prompt_by_prompt(client):
    ask = {"model": "tiny", "max_tokens": 6, "n": 2, "seed": 5, "temperature": 1.0}
    both = client.completions.create(prompt=["abc", "xyz"], **ask)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    alone = client.completions.create(prompt="xyz", **ask)
    assert [choice.text for choice in both.choices[2:]] == [c.text for c in alone.choices]
    assert both.usage.prompt_tokens == 6

    texts = dict.fromkeys(range(4), "")
    for part in client.completions.create(prompt=["abc", "xyz"], stream=True, **ask):
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == {choice.index: choice.text for choice in both.choices}


def test_token_ids_are_the_same_prompt_as_their_text(client, live):
    tokens = httpx.post(f"{live.http}/tokenize", json={"prompt": "abc"}).json()["tokens"]
    ask = {"model": "tiny", "max_tokens": 4, "temperature": 0}
    texts = {
        client.completions.create(prompt=prompt, **ask).choices[0].text
        for prompt in ("abc", tokens, [tokens])
    }
    assert len(texts) == 1
    echoed = client.completions.create(prompt=tokens, echo=True, **ask).choices[0].text
    assert echoed == "abc" + texts.pop()


def test_a_stop_string_ends_the_text_before_it(client):
    ask = {"model": "tiny", "prompt": "abc", "max_tokens": 40, "seed": 1, "temperature": 1.0}
    text = client.completions.create(**ask).choices[0].text
    stop = text[3:5]
    [choice] = client.completions.create(**ask, stop=[stop, "never to be seen"]).choices
    assert choice.text == text[: text.index(stop)]
    assert choice.finish_reason == "stop"
    assert choice.stop_reason == stop


def test_a_bias_bans_and_forces_tokens(client, live):
    ask = {"model": "tiny", "prompt": "abc", "max_tokens": 6, "temperature": 0}
    ask["extra_body"] = {"ignore_eos": True}
    [token] = httpx.post(f"{live.http}/tokenize", json={"prompt": "Q"}).json()["tokens"]
    assert (
        client.completions.create(**ask, logit_bias={str(token): 100}).choices[0].text == "QQQQQQ"
    )


def test_a_penalty_keeps_tokens_from_coming_again(client, live):
    """Of two tokens one is far likelier; a penalty that grows, or divides, brings the other."""
    tokens = httpx.post(f"{live.http}/tokenize", json={"prompt": "QZ"}).json()["tokens"]
    ask = {"model": "tiny", "prompt": "abc", "max_tokens": 150, "temperature": 0}
    ask["logit_bias"] = {str(tokens[0]): 100}

    def text(**penalty: float) -> str:
        body = {"ignore_eos": True, "allowed_token_ids": tokens, **penalty}
        return client.completions.create(**ask, extra_body=body).choices[0].text

    assert text() == "Q" * 150
    assert text(presence_penalty=2.0) == "Q" * 150
    assert set(text(frequency_penalty=2.0)) == {"Q", "Z"}
    assert set(text(repetition_penalty=100.0)) == {"Q", "Z"}


def test_completion_logprobs_name_each_token_and_the_likeliest(client):
    [choice] = client.completions.create(
        model="tiny", prompt="abc", max_tokens=5, temperature=0, logprobs=3
    ).choices
    scores = choice.logprobs
    assert len(scores.tokens) == len(scores.token_logprobs) == len(scores.top_logprobs) == 5
    assert scores.text_offset[0] == 0
    for value, top in zip(scores.token_logprobs, scores.top_logprobs, strict=True):
        assert value == pytest.approx(max(top.values()))


def test_chat_logprobs_have_as_many_tops_as_asked_for(client):
    for num_top in (None, 0, 2):
        extra = {} if num_top is None else {"top_logprobs": num_top}
        [choice] = client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_completion_tokens=5, temperature=1.5, seed=2,
            logprobs=True, **extra,
        ).choices  # fmt: skip
        assert len(choice.logprobs.content) == 5
        for entry in choice.logprobs.content:
            assert len(entry.top_logprobs) == (num_top or 0)
            assert entry.logprob <= 0
            assert bytes(entry.bytes).decode(errors="replace") == entry.token


def test_a_chat_answers_through_the_models_template(client, live):
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=9, temperature=0
    )
    assert answer.object == "chat.completion"
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    rendered = httpx.post(f"{live.http}/tokenize", json={"messages": MESSAGES}).json()
    assert answer.usage.prompt_tokens == rendered["count"]
    same = client.completions.create(
        model="tiny", prompt=rendered["tokens"], max_tokens=9, temperature=0
    )
    assert choice.message.content == same.choices[0].text


def test_a_chat_stream_names_the_role_once_and_adds_up(client):
    ask = {"model": "tiny", "messages": MESSAGES, "n": 2, "seed": 3, "max_tokens": 8}
    whole = client.chat.completions.create(**ask)
    texts, roles = {0: "", 1: ""}, []
    options = {"include_usage": True}
    parts = list(client.chat.completions.create(**ask, stream=True, stream_options=options))
    for part in parts:
        assert part.object == "chat.completion.chunk"
        for choice in part.choices:
            roles += [choice.delta.role] if choice.delta.role else []
            texts[choice.index] += choice.delta.content or ""
    assert roles == ["assistant"] * 2
    assert [texts[0], texts[1]] == [choice.message.content for choice in whole.choices]
    assert parts[-1].usage == whole.usage


def test_a_chat_without_a_limit_takes_what_the_context_leaves(client):
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 512


def test_seeds_repeat_and_differ(client):
    def text(seed: int) -> str:
        return client.completions.create(
            model="tiny", prompt="abc", max_tokens=16, seed=seed, temperature=1.0
        ).choices[0].text  # fmt: skip

    assert text(1) == text(1) != text(2)


def test_the_served_model_is_listed(client):
    [model] = client.models.list().data
    assert (model.id, model.owned_by, model.max_model_len) == ("tiny", "octavo", 512)
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another/one")


BAD = {
    "temperature": ({"temperature": 3.0}, "temperature"),
    "a string for a number": ({"extra_body": {"temperature": "hot"}}, "temperature"),
    "no tokens": ({"max_tokens": 0}, "max_tokens"),
    "beyond the context": ({"max_tokens": 5000}, "max_tokens"),
    "n": ({"n": 100}, "n"),
    "several greedy": ({"n": 2, "temperature": 0}, "n"),
    "an empty prompt": ({"prompt": ""}, "prompt"),
    "no prompts": ({"prompt": []}, "prompt"),
    "mixed prompts": ({"prompt": ["a", [1]]}, "prompt"),
    "a prompt that is a number": ({"extra_body": {"prompt": 4}}, "prompt"),
    "a token beyond the vocabulary": ({"prompt": [1, 100000]}, "prompt_token_ids"),
    "a prompt beyond the context": ({"prompt": "x" * 600}, "prompt"),
    "bias of no token": ({"logit_bias": {"x": 1}}, "logit_bias"),
    "an unknown field": ({"extra_body": {"temprature": 1}}, "temprature"),
    "an empty stop": ({"stop": ""}, "stop"),
    "a stop that is no text": ({"extra_body": {"stop": [3]}}, "stop"),
    "a format": ({"extra_body": {"response_format": {"type": "xml"}}}, "response_format.type"),
    "a schema that is none": (
        {"extra_body": {"response_format": {"type": "json_schema"}}},
        "response_format.json_schema",
    ),
    "a schema of no type": (
        {
            "extra_body": {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "x"}},
                }
            }
        },
        "response_format",
    ),
    "two grammars": (
        {"extra_body": {"guided_regex": "a", "structured_outputs": {"regex": "b"}}},
        "guided_regex",
    ),
    "an unclosed group": ({"extra_body": {"guided_regex": "(a"}}, "guided_regex"),
    "no grammar": ({"extra_body": {"structured_outputs": {}}}, "structured_outputs"),
    "infilling": ({"suffix": "the end"}, "suffix"),
    "best of": ({"best_of": 4}, "best_of"),
    "usage without a stream": ({"stream_options": {"include_usage": True}}, "stream_options"),
    "usage with every event but the last": (
        {"extra_body": {"stream": True, "stream_options": {"continuous_usage_stats": True}}},
        "stream_options.continuous_usage_stats",
    ),
    "priority": ({"extra_body": {"priority": "urgent"}}, "priority"),
    "a negative seed": ({"seed": -2}, "seed"),
    "a target": ({"extra_headers": {"x-slo-ttft-ms": "soon"}}, "x-slo-ttft-ms"),
    "an id": ({"extra_headers": {"x-request-id": "x" * 500}}, "x-request-id"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
def test_bad_input_names_its_field(client, case, stream):
    change, field = BAD[case]
    ask = {"model": "tiny", "prompt": "abc", "max_tokens": 4}
    stream = stream and "stream_options" not in change
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**(ask | change), stream=stream)
    assert caught.value.param == field
    assert caught.value.code == "invalid_request"
    assert "is not allowed" in caught.value.message


def test_bad_chats_name_their_field(client):
    ask = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4}
    for change, field in (
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_completion_tokens": 9}, "max_tokens"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**(ask | change))
        assert caught.value.param == field


def test_another_models_name_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="another", prompt="abc")
    assert caught.value.code == "model_not_found"
    assert "'tiny'" in caught.value.message


def test_an_id_in_flight_may_be_given_again(client, live):
    named = {"extra_headers": {"x-request-id": "mine"}}
    ask = {"model": "tiny", "prompt": "abc", "temperature": 0, "max_tokens": 20}
    alone = client.completions.create(**ask)
    with client.completions.create(
        model="tiny", prompt="xyz", max_tokens=500, stream=True,
        extra_body={"ignore_eos": True}, **named,
    ) as stream:  # fmt: skip
        next(iter(stream))
        beside = client.completions.with_raw_response.create(**ask, **named)
    assert beside.headers["x-request-id"] == "mine"
    assert beside.parse().choices == alone.choices
    until(lambda: is_idle(live))


def test_a_passed_deadline_is_a_timeout(client, live):
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(
            model="tiny", prompt="abc", max_tokens=500,
            extra_body={"ignore_eos": True, "timeout_s": 0.001},
        )  # fmt: skip
    assert caught.value.status_code == 504
    assert caught.value.code == "deadline_exceeded"
    until(lambda: is_idle(live))


def test_a_dropped_stream_gives_its_pages_back(client, live):
    stream = client.completions.create(
        model="tiny", prompt="abc" * 50, max_tokens=350, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    next(iter(stream))
    stream.close()
    until(lambda: is_idle(live))
    assert load(live)["num_total_pages"] == 159


async def test_a_client_that_leaves_before_its_answer_gives_its_pages_back(live):
    before = load(live)["generation_tokens"]
    body = {"prompt": "abc", "max_tokens": 500, "n": 8, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=live.http, timeout=WAIT_S) as client:
        call = asyncio.create_task(client.post("/v1/completions", json=body))
        while (await client.get("/v1/load")).json()["num_inflight"] == 0:
            assert not call.done()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    until(lambda: is_idle(live))
    assert load(live)["generation_tokens"] - before < 8 * 500


async def test_many_streams_at_once_each_get_their_own_text(live):
    async with openai.AsyncOpenAI(base_url=f"{live.http}/v1", api_key="unused") as client:

        async def text(prompt: str) -> str:
            stream = await client.completions.create(
                model="tiny", prompt=prompt, max_tokens=12, temperature=0, stream=True
            )
            return "".join([part.choices[0].text async for part in stream])

        prompts = ["abc", "xyz"] * 12
        texts = await asyncio.gather(*map(text, prompts))
        alone = {prompt: await text(prompt) for prompt in ("abc", "xyz")}
    assert list(texts) == [alone[prompt] for prompt in prompts]
    until(lambda: is_idle(live))
