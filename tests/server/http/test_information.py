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


def test_the_schedule_shows_rows_by_time(live):
    with httpx.Client(base_url=live.http, timeout=60) as http:
        http.get("/v1/schedule")
        body = {"prompt": "abcdefg", "max_tokens": 6, "ignore_eos": True}
        headers = {"x-slo-ttft-ms": "50000"}
        assert http.post("/v1/completions", json=body, headers=headers).status_code == 200
        seen = http.get("/v1/schedule").json()
        (replica,) = seen["replicas"]
        rows = [row for step in replica["steps"] for row in step["rows"]]
        chunks = [row for row in rows if row[2] == "prefill"]
        assert sum(row[3] for row in chunks) >= 7
        assert all(0 < row[4] < 50 for row in chunks[-1:])
        assert "admitted: " in chunks[-1][5]
        assert sum(row[3] for row in rows if row[2] == "decode") >= 5
        assert {"arrived", "length"} <= {mark["kind"] for mark in replica["marks"]}
        assert max(step["end_s"] for step in replica["steps"]) <= seen["now_s"]
        later = http.get(f"/v1/schedule?since_s={seen['now_s']}").json()
        assert later["replicas"] == [{"steps": [], "marks": []}]
        for wrong in ("x", "-1", "nan", "inf", ""):
            refused = http.get(f"/v1/schedule?since_s={wrong}")
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "since_s"
