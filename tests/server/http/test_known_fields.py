"""Fields that other servers know: taken where they ask for nothing, else refused by name."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from octavo.server.http.known_fields import NEUTRAL, unserved
from octavo.server.http.protocol import ChatRequest, CompletionRequest, Generation, refusal

ASKS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 6, "temperature": 0},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "abc"}], "max_tokens": 6, "temperature": 0
    },
}  # fmt: skip
BODIES: list[tuple[type[Generation], dict[str, Any]]] = [
    (CompletionRequest, ASKS["/v1/completions"]),
    (ChatRequest, ASKS["/v1/chat/completions"]),
]
ROUTER_FIELDS = {
    "no_stop_trim": False, "parallel_tool_calls": True, "service_tier": "auto",
    "prompt_cache_key": "a conversation", "spaces_between_special_tokens": True,
    "mm_processor_kwargs": None, "reasoning_effort": "medium", "lora_path": None,
    "separate_reasoning": True, "stream_reasoning": True, "return_hidden_states": False,
    "stream_options": {"include_usage": False, "continuous_usage_stats": None}, "user": None,
}  # fmt: skip
"""As routers and agent frameworks write them out."""


def texts(answer: httpx.Response) -> list[Any]:
    assert answer.status_code == 200, answer.text
    return [choice.get("text", choice.get("message")) for choice in answer.json()["choices"]]


@pytest.mark.parametrize("route", ASKS)
def test_neutral_fields_change_no_answer(live, route):
    body = ASKS[route]
    is_chat = route.startswith("/v1/chat")
    fields = (ChatRequest if is_chat else CompletionRequest).model_fields
    everything = {name: values[0] for name, values in NEUTRAL.items() if values}
    nulls = dict.fromkeys([*NEUTRAL, *fields, "of_a_server_to_come"])
    router = {
        name: value for name, value in ROUTER_FIELDS.items() if is_chat or "effort" not in name
    }
    if is_chat:
        router |= {"logprobs": False, "top_logprobs": 0, "tools": [], "tool_choice": "auto"}
    with httpx.Client(base_url=live.http, timeout=60) as http:
        plain = texts(http.post(route, json=body))
        for extra in (everything, nulls, router):
            assert texts(http.post(route, json=extra | body)) == plain


@given(name=st.sampled_from(sorted(NEUTRAL)), data=st.data())
def test_every_other_value_is_refused_by_name(name, data):
    neutral = NEUTRAL[name]
    wanted = data.draw(
        st.sampled_from([None, *neutral])
        | st.booleans()
        | st.sampled_from([0, 1, 0.5, -1, "", "x", "none", [], ["text"], {}, {"a": None}])
    )
    asks_nothing = wanted is None or any(
        wanted == value and isinstance(wanted, bool) == isinstance(value, bool) for value in neutral
    )
    for model, body in BODIES:
        if name in model.model_fields:
            continue
        if asks_nothing:
            model.model_validate(body | {name: wanted})
            continue
        with pytest.raises(ValidationError) as caught:
            model.model_validate(body | {name: wanted})
        first = caught.value.errors()[0]
        error = refusal(first["type"], first["loc"], first["input"], first["msg"])
        assert error.field == name
        assert "not given: it is not served" in error.allowed


@pytest.mark.parametrize(
    ("extra", "field", "said"),
    [
        ({"temprature": 1}, "temprature", "did you mean temperature?"),
        ({"no_stop_trim": True}, "no_stop_trim", "use include_stop_str_in_output"),
        ({"service_tier": "flex"}, "service_tier", '"auto" or "default"'),
        (
            {"stream": True, "stream_options": {"include_usge": 1}},
            "stream_options.include_usge",
            "include_usage",
        ),
        ({"x" * 5000: 1}, "x" * 5000, "it is not known here"),
        ({"prompt": None}, "prompt", "it is required"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
    ],
    ids=["typo", "stop trim", "tier", "nested", "long", "null", "number for true"],
)
def test_a_refusal_says_what_would_do(live, extra, field, said):
    body = ASKS["/v1/completions"] | extra
    answer = httpx.post(f"{live.http}/v1/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert said in error["message"]


@pytest.mark.parametrize(
    ("path", "extra", "field"),
    [
        ("/v1/responses", {"text": {"verbosity": "low"}}, "text.verbosity"),
        ("/v1/responses", {"text": {"format": {"type": "x"}}}, "text.format.type"),
        ("/v1/completions", {"stop": [1]}, "stop"),
        ("/v1/completions", {"logit_bias": {"7": "x"}}, "logit_bias"),
    ],
)
def test_a_field_within_a_field_is_named_whole(live, path, extra, field):
    answer = httpx.post(f"{live.http}{path}", json=ASKS.get(path, {"input": "x"}) | extra)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_two_limits_of_a_chat_are_both_named(live):
    body = ASKS["/v1/chat/completions"] | {"max_completion_tokens": 9}
    answer = httpx.post(f"{live.http}/v1/chat/completions", json=body)
    told = "max_tokens = 6 is not allowed: max_completion_tokens (9), or not given"
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, told)
    body["max_completion_tokens"] = 6
    assert httpx.post(f"{live.http}/v1/chat/completions", json=body).status_code == 200


def test_a_chat_templates_effort_is_the_requests(live):
    body = {"messages": [{"role": "user", "content": "x"}], "reasoning_effort": "some"}
    answer = httpx.post(f"{live.http}/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "reasoning_effort")


def test_a_name_that_another_api_knows_is_not_said_to_mean_itself():
    assert str(unserved("logit_bias", {}, {"logit_bias"})).endswith("it is not known here")
    assert "did you mean logit_bias?" in str(unserved("logit_bia", {}, {"logit_bias"}))
