"""How a body says what its prompt becomes: special tokens, truncation, templates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

MESSAGES = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "The answer"}]
GREEDY = {"temperature": 0, "max_tokens": 4}


@pytest.fixture(scope="module")
def http(live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.http, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def trusting(server_process, tiny_model, tiny_args, tmp_path_factory):
    log = tmp_path_factory.mktemp("trusting") / "stderr"
    arguments = ("--model", str(tiny_model), *tiny_args, "--trust-request-chat-template")
    with server_process(*arguments, log=log) as process:
        yield process


def prompt_of(http: httpx.Client, **fields: Any) -> str:
    """The prompt as the model had it."""
    route = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    answer = http.post(route, json=GREEDY | {"return_token_ids": True} | fields).json()
    ids = answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
    body = {"tokens": ids, "skip_special_tokens": False}
    return http.post("/detokenize", json=body).json()["prompt"]


def test_a_chat_goes_on_with_its_last_message(http):
    assert prompt_of(http, messages=MESSAGES, continue_final_message=True).endswith("The answer")
    plain = prompt_of(http, messages=MESSAGES)
    assert plain.endswith("[assistant]")
    assert prompt_of(http, messages=MESSAGES, continue_final_message=False) == plain
    both = {"continue_final_message": True, "add_generation_prompt": True}
    answer = http.post("/v1/chat/completions", json={"messages": MESSAGES, **both})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "add_generation_prompt")


def test_tokenize_renders_as_a_chat_does(http):
    body = {"messages": MESSAGES, "continue_final_message": True}
    tokens = http.post("/tokenize", json=body).json()["tokens"]
    answer = http.post(
        "/v1/chat/completions", json=GREEDY | body | {"return_token_ids": True}
    ).json()
    assert answer["prompt_token_ids"] == tokens


def test_a_prompt_is_cut_to_its_length(http):
    assert prompt_of(http, prompt="abcdef", truncate_prompt_tokens=3) == "def"
    cut = {"truncate_prompt_tokens": 3, "truncation_side": "right"}
    assert prompt_of(http, prompt="abcdef", **cut) == "abc"
    assert prompt_of(http, messages=MESSAGES, truncate_prompt_tokens=5) == "tant]"
    assert len(prompt_of(http, prompt="x" * 2000, truncate_prompt_tokens=-1)) == 508
    echoed = http.post(
        "/v1/completions", json=GREEDY | cut | {"prompt": "abcdef", "echo": True}
    ).json()
    assert echoed["choices"][0]["text"].startswith("abc")
    for bad in (0, 512, "three"):
        body = {"prompt": "x", "truncate_prompt_tokens": bad}
        answer = http.post("/v1/completions", json=body)
        assert answer.json()["error"]["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize("value", [None, True, False])
def test_special_tokens_may_be_left_out(http, value):
    ids = http.post("/tokenize", json={"prompt": "abc", "add_special_tokens": value}).json()
    assert ids["count"] == 3  # this model wants none
    assert prompt_of(http, prompt="abc", add_special_tokens=value) == "abc"
    assert prompt_of(http, messages=MESSAGES, add_special_tokens=value).endswith("[assistant]")


def test_a_requests_template_is_not_trusted_unless_the_operator_says_so(http):
    body = {"messages": MESSAGES, "chat_template": "{{ messages[0].content }}?"}
    answer = http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template")
    assert "does not trust" in answer.json()["error"]["message"]


def test_a_server_that_trusts_them_renders_requests_templates(http, trusting):
    with httpx.Client(base_url=trusting.http, timeout=60) as client:
        template = "{{ messages[0].content }}?"
        assert prompt_of(client, messages=MESSAGES, chat_template=template) == "abc?"
        for bad in ("{% if %}", "x" * 100_000, "{{ raise_exception('no') }}"):
            body = {"messages": MESSAGES, "chat_template": bad}
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 400
