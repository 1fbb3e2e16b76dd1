"""What a server tells of itself under the names that routers and harnesses ask for."""

from __future__ import annotations

import httpx

from octavo.server.server_info import octavo_version


def test_a_server_says_what_it_is(live):
    with httpx.Client(base_url=live.http, timeout=60) as http:
        assert http.get("/version").json() == {"version": octavo_version()}
        facts = http.get("/server_info").json()
        assert facts["version"] == octavo_version()
        assert (facts["platform"], facts["draining"]) == ("cpu", False)
        assert facts["uptime_s"] > 0
        assert facts["engine_args"]["served_model_name"] == "tiny"
        for answer in (http.get("/ping"), http.post("/ping"), http.post("/ping", content=b"{}")):
            assert answer.status_code == 200
            assert answer.json() == http.get("/health").json()


def test_special_tokens_are_named_as_they_are_tokenized(live):
    with httpx.Client(base_url=live.http, timeout=60) as http:
        facts = http.get("/tokenizer_info").json()
        for name, token_id in (("bos_token", 0), ("eos_token", 1)):
            body = {"prompt": facts[name], "add_special_tokens": False}
            assert http.post("/tokenize", json=body).json()["tokens"] == [token_id]
        assert "[assistant]" in facts["chat_template"]
