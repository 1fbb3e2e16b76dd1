"""Traces: every format is read to the same requests, and a bad line is named with its field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.engine.errors import InvalidConfigError
from octavo.engine.simulation.workloads.traces import FORMATS, read_arrivals, read_trace
from octavo.engine.simulation.workloads.traffic import TrafficClass, prompt_tokens

CSV = {
    "arrivals": "arrival_s,input_tokens,output_tokens\n0,374,44\n2.5,396,109\n",
    "azure": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:49.1805900,396,109\n"
    ),
    "burstgpt": (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,374,44,418,Conversation log\n6,GPT-4,90,0,90,API log\n"
        "7.5,GPT-4,396,109,505,API log\n"
    ),
    "servegen": (
        "request_id,client_id,timestamp,input_tokens,output_tokens\n0,7,3.0,374,44\n1,8,5.5,396,109\n"
    ),
    "lengths": "input_tokens,output_tokens\n374,44\n396,109\n",
}


def write(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def lines(*rows: dict) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize("name", CSV)
def test_a_table_is_recognised_by_its_columns(tmp_path: Path, name: str) -> None:
    trace = read_trace(write(tmp_path, CSV[name]))
    assert trace.format.name == name
    assert [(a.num_input, a.num_output) for a in trace.arrivals] == [(374, 44), (396, 109)]
    seconds = [0.0, 0.0] if name == "lengths" else [0.0, 2.5]
    assert [a.arrival_s for a in trace.arrivals] == pytest.approx(seconds, abs=1e-6)


def test_every_format_is_read_somewhere_here() -> None:
    assert {known.name for known in FORMATS} == {*CSV, "servegen-lengths", "mooncake"}


def test_azures_dates_of_2024_name_their_zone(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.009930+00:00,10,2\n2024-05-10 00:00:01+00:00,11,3\n"
    )
    arrivals = read_arrivals(write(tmp_path, text))
    assert [a.arrival_s for a in arrivals] == pytest.approx([0.0, 0.99007])


def test_servegens_clients_are_tenants_in_every_spelling(tmp_path: Path) -> None:
    table = read_trace(write(tmp_path, CSV["servegen"])).arrivals
    flat = read_trace(write(tmp_path, lines(
        {"client_id": 7, "timestamp": 3.0, "input_length": 374, "output_length": 44},
        {"client_id": 8, "timestamp": 5.5, "input_length": 396, "output_length": 109},
    ), "flat.jsonl"))  # fmt: skip
    nested = read_trace(write(tmp_path, lines(
        {"client_id": 7, "timestamp": 3.0, "data": {"input_tokens": 374, "output_tokens": 44}},
        {"client_id": 8, "timestamp": 5.5, "data": {"input_tokens": 396, "output_tokens": 109}},
    ), "nested.jsonl"))  # fmt: skip
    assert flat.format.name == "servegen-lengths"
    assert table == flat.arrivals == nested.arrivals
    assert [a.traffic_class.tenant for a in table] == ["7", "8"]


def test_tenants_keep_the_promises_of_the_class(tmp_path: Path) -> None:
    chat = TrafficClass(name="chat", ttft_target_s=1.0)
    first, _ = read_trace(write(tmp_path, CSV["servegen"]), chat, "x-").arrivals
    assert first.traffic_class == TrafficClass(name="chat", ttft_target_s=1.0, tenant="7")
    assert first.request_id == "x-0"


def test_a_format_can_be_named(tmp_path: Path) -> None:
    path = write(tmp_path, CSV["arrivals"])
    trace = read_trace(path, format_name="lengths")
    assert not trace.has_times
    with pytest.raises(InvalidConfigError, match="times of arrival"):
        read_arrivals(write(tmp_path, CSV["lengths"]))
    with pytest.raises(InvalidConfigError, match="column TIMESTAMP"):
        read_trace(path, format_name="azure")
    with pytest.raises(InvalidConfigError, match="trace_format = 'vidur'"):
        read_trace(path, format_name="vidur")


def test_mooncakes_hash_ids_make_prompts_that_begin_alike(tmp_path: Path) -> None:
    path = write(tmp_path, lines(
        {"timestamp": 0, "input_length": 1024, "output_length": 3, "hash_ids": [4, 5]},
        {"timestamp": 500, "input_length": 1100, "output_length": 3, "hash_ids": [4, 5, 6]},
        {"timestamp": 900, "input_length": 520, "output_length": 3, "hash_ids": [4, 6]},
        {"timestamp": 990, "input_length": 520, "output_length": 3},
    ), "m.jsonl")  # fmt: skip
    a, b, c, d = (prompt_tokens(x, n) for n, x in enumerate(read_trace(path).arrivals))
    assert a == b[:1024]
    assert c[:512] == a[:512]
    assert not set(c[512:]) & set(a)
    assert not set(d) & {*a, *b, *c}


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"hash_ids": [1, 2]}, "hash_ids"),  # 1,100 tokens are three blocks
        ({"hash_ids": [1, 2, 3, 4]}, "hash_ids"),
        ({"hash_ids": []}, "hash_ids"),
        ({"hash_ids": "123"}, "hash_ids"),
        ({"hash_ids": [1, 2, 3.5]}, "hash_ids"),
        ({"hash_ids": [1, 2, True]}, "hash_ids"),
        ({"input_length": 0}, "input_length"),
        ({"input_length": 10.5}, "input_length"),
        ({"input_length": "many"}, "input_length"),
        ({"input_length": None}, "input_length"),
        ({"output_length": -1}, "output_length"),
        ({"output_length": True}, "output_length"),
        ({"output_length": [5]}, "output_length"),
        ({"timestamp": -1}, "timestamp"),
        ({"timestamp": "soon"}, "timestamp"),
        ({"timestamp": float("nan")}, "timestamp"),
        ({"timestamp": float("inf")}, "timestamp"),
    ],
)
def test_a_bad_line_names_file_line_and_field(tmp_path: Path, row: dict, field: str) -> None:
    good = {"timestamp": 0, "input_length": 1100, "output_length": 3, "hash_ids": [1, 2, 3]}
    path = write(tmp_path, lines(good, {**good, **row}), "m.jsonl")
    with pytest.raises(InvalidConfigError, match=f"line 2, field {field}") as caught:
        read_trace(path)
    assert caught.value.value == path


def test_a_field_that_a_later_line_lacks_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, lines(
        {"timestamp": 0, "input_length": 1, "output_length": 3},
        {"timestamp": 0, "input_length": 1},
    ), "m.jsonl")  # fmt: skip
    with pytest.raises(InvalidConfigError, match="line 2, field output_length: None"):
        read_trace(path)
    with pytest.raises(InvalidConfigError, match="line 3, field output_tokens"):
        read_trace(write(tmp_path, "input_tokens,output_tokens\n5,5\n5\n"))


@pytest.mark.parametrize(
    ("date", "fits"), [("2023-11-16 18:15:46", True), ("yesterday", False), ("", False)]
)
def test_a_date_is_read_or_refused_by_line(tmp_path: Path, date: str, fits: bool) -> None:
    path = write(tmp_path, f"TIMESTAMP,ContextTokens,GeneratedTokens\n{date},1,2\n")
    if fits:
        assert read_trace(path).arrivals[0].arrival_s == 0.0
    else:
        with pytest.raises(InvalidConfigError, match="line 2, field TIMESTAMP"):
            read_trace(path)


@pytest.mark.parametrize(
    ("name", "text", "hint"),
    [
        ("t.csv", "", "column input_tokens"),
        ("t.csv", "a,b\n1,2\n", "column input_tokens"),
        ("t.csv", "input_tokens,output_tokens\n", "file with requests"),
        ("t.jsonl", "\n", "file with requests"),
        ("t.jsonl", "[1]\n", "an object in line 1"),
        ("t.jsonl", '{"timestamp": 0, "input_length": 5}\n', "column output_length"),
        ("t.jsonl", '\n{"timestamp": 0,\n', "JSON in line 2"),
    ],
)
def test_a_file_of_no_known_format_is_refused(
    tmp_path: Path, name: str, text: str, hint: str
) -> None:
    with pytest.raises(InvalidConfigError, match=hint):
        read_trace(write(tmp_path, text, name))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="readable"):
        read_trace(tmp_path / "none.jsonl")
    path = tmp_path / "bytes.csv"
    path.write_bytes(b"input_tokens,output_tokens\n\xff\xfe,3\n")
    with pytest.raises(InvalidConfigError, match="readable"):
        read_trace(path)
