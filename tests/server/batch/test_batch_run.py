"""Batches from file to file through a real engine, in this process and killed in another."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, InvalidRequestError, SamplingParams
from octavo.engine.structured import compiler
from octavo.engine.structured.params import StructuredOutputsParams
from octavo.server.batch.results import ResultsFile
from octavo.server.batch.run import BatchRun, BatchSummary
from octavo.server.batch.tasks import MAX_LINE_BYTES, BadLineError
from tests.examples import DOCS, examples

DEFAULTS = SamplingParams(max_tokens=4, temperature=0.0)
WAIT_S = 240


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    llm = LLM(
        str(tiny_model), served_model_name="tiny", progress=False, max_num_seqs=4,
        max_num_batched_tokens=32, max_model_len=128, num_kv_pages=40, warm_up="coarse",
    )  # fmt: skip
    yield llm
    llm.close()
    llm.engine.check_integrity()


def run(llm: LLM, source: Path, output: Path, **options: Any) -> BatchSummary:
    options = {"progress": False, "defaults": DEFAULTS} | options
    with ResultsFile(output) as results:
        return BatchRun(llm.engine, source, results, **options).run()


def write(path: Path, lines: list[Any]) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def chat(name: str, **body: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]} | body
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


def test_plain_lines_are_answered_as_generate_would(llm: LLM, tmp_path: Path) -> None:
    lines: list[Any] = [
        '"a prompt"',
        {"prompt": "abc", "custom_id": "one", "max_tokens": 6, "priority": "high"},
        {"prompt_token_ids": [5, 6, 7], "n": 2, "temperature": 1.0, "seed": 3},
        {"messages": [{"role": "user", "content": "hi"}]},
        {"prompt": "x", "structured_outputs": {"choice": ["zz"]}},
    ]
    done = run(llm, write(tmp_path / "in", lines), tmp_path / "out")
    assert (done.num_done, done.num_bad, done.num_failed) == (5, 0, 0)
    records = {record["line"]: record for record in read(tmp_path / "out")}
    direct = llm.generate("abc", DEFAULTS.replace(max_tokens=6), use_tqdm=False)[0].outputs[0]
    assert records[2]["custom_id"] == "one"
    assert records[2]["token_ids"] == direct.token_ids
    assert records[2]["text"] == direct.text
    assert records[1]["usage"]["completion_tokens"] <= 4
    assert len(records[3]["completions"]) == 2
    assert records[5]["text"] == "zz"


def test_openais_lines_give_openais_results(llm: LLM, tmp_path: Path) -> None:
    prompts = {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 3, "temperature": 0}
    completion = {"custom_id": "p", "method": "POST", "url": "/v1/completions", "body": prompts}
    wanted = {"type": "json_schema", "json_schema": {"name": "c", "schema": {"const": 5}}}
    lines = [chat("c", max_tokens=3), completion, chat("s", response_format=wanted)]
    run(llm, write(tmp_path / "in", lines), tmp_path / "out")
    records = {record["custom_id"]: record for record in read(tmp_path / "out")}
    assert {record["response"]["status_code"] for record in records.values()} == {200}
    body = records["c"]["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["role"] == "assistant"
    body = records["p"]["response"]["body"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"]["prompt_tokens"] == 2
    assert records["s"]["response"]["body"]["choices"][0]["message"]["content"].strip() == "5"
    assert records["s"]["id"] == "batch_req_3"


def embedding(name: str, **body: Any) -> dict[str, Any]:
    body = {"model": "tiny", "input": ["abc"]} | body
    return {"custom_id": name, "method": "POST", "url": "/v1/embeddings", "body": body}


BAD: list[tuple[Any, str]] = [
    ("{not json", "line"),
    ("7", "line"),
    ({"text": "abc"}, "prompt"),
    ({"prompt": "a", "prompt_token_ids": [1]}, "prompt"),
    ({"prompt": "a", "temprature": 1}, "temprature"),
    ({"prompt": "a", "temperature": 9}, "temperature"),
    ({"prompt": "a" * 200}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": "a", "custom_id": 5}, "custom_id"),
    ({"prompt": "a", "tenant": 5}, "tenant"),
    ({"prompt_token_ids": [10**6]}, "prompt_token_ids"),
    ({"prompt": "a", "structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    (chat("x", model="other"), "model"),
    (chat("x", stream=True), "stream"),
    (chat("x", max_tokens=-1), "max_tokens"),
    ({**chat("x"), "url": "/v1/files"}, "url"),
    (embedding("x"), "task"),
    ({**chat("x"), "method": "GET"}, "method"),
    ({"url": "/v1/completions", "body": {}}, "custom_id"),
    ('"' + "x" * (MAX_LINE_BYTES + 5) + '"', "line"),
]


def test_bad_lines_are_skipped_reported_and_have_results(llm: LLM, tmp_path: Path) -> None:
    good = {"prompt": "abc"}
    lines = [item for bad, _ in BAD for item in (bad, good)]
    reports: list[str] = []
    source = write(tmp_path / "in", lines)
    done = run(llm, source, tmp_path / "out", on_error="skip", report=reports.append)
    assert (done.num_bad, done.num_done) == (len(BAD), len(BAD))
    records = read(tmp_path / "out")
    assert len(records) == len(lines)
    for place, (_, field) in enumerate(BAD):
        number = 2 * place + 1
        [report] = [text for text in reports if text.startswith(f"line {number}: ")]
        assert report.startswith(f"line {number}: {field} = "), report
    refused = [r for r in records if "response" in r and r["response"]["status_code"] >= 400]
    assert {r["response"]["status_code"] for r in refused} == {400, 404}
    failed = [r for r in records if "line" in r and "error" in r]
    assert len(failed) + len(refused) == len(BAD)
    again = run(llm, source, tmp_path / "out", on_error="skip", report=reports.append)
    assert (again.num_done, again.num_bad, again.num_found) == (0, 0, len(lines))


def test_a_bad_line_stops_the_run_after_the_lines_before_it(llm: LLM, tmp_path: Path) -> None:
    source = write(tmp_path / "in", [{"prompt": "a"}, {"prompt": "b"}, "{", {"prompt": "c"}])
    with pytest.raises(BadLineError, match="line 3"):
        run(llm, source, tmp_path / "out")
    assert sorted(record["line"] for record in read(tmp_path / "out")) == [1, 2]
    source.write_text(source.read_text().replace("{\n", '"better"\n', 1))
    done = run(llm, source, tmp_path / "out")
    assert (done.num_done, done.num_found) == (2, 2)


def test_a_line_that_the_engine_refuses_stops_the_reading_too(llm: LLM, tmp_path: Path) -> None:
    # Too long by its tokens alone, so that only the engine can tell.
    lines = [{"prompt": "a"}, {"prompt": "b" * 200}, {"prompt": "c"}, "{never read"]
    with pytest.raises(BadLineError, match="line 2: prompt"):
        run(llm, write(tmp_path / "in", lines), tmp_path / "out")
    assert [record["line"] for record in read(tmp_path / "out")] == [1]


def test_results_of_another_input_are_not_mixed_with_these(llm: LLM, tmp_path: Path) -> None:
    write(tmp_path / "a", [{"prompt": "a", "custom_id": "a1"}])
    write(tmp_path / "b", [{"prompt": "b", "custom_id": "b1"}, {"prompt": "c"}])
    run(llm, tmp_path / "a", tmp_path / "out")
    with pytest.raises(InvalidRequestError, match="a1"):
        run(llm, tmp_path / "b", tmp_path / "out")
    assert not llm.engine.has_unfinished


def test_only_a_window_of_lines_is_ever_in_the_engine(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "in", [{"prompt": "a", "max_tokens": 1}] * 120)
    held: list[int] = []
    step = llm.engine.step

    def count() -> Any:
        held.append(len(llm.engine.outputs))
        return step()

    monkeypatch.setattr(llm.engine, "step", count)
    assert run(llm, source, tmp_path / "out").num_done == 120
    assert max(held) == 8


def test_a_grammar_that_takes_long_holds_up_no_other_line(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others_done, compile_grammar = threading.Event(), compiler.compile_grammar

    def compile_late(params: StructuredOutputsParams, *rest: Any) -> Any:
        if params.choice == ("late",):
            assert others_done.wait(0.9 * compiler.COMPILE_TIMEOUT_S)
        return compile_grammar(params, *rest)

    class Watched(ResultsFile):
        def append(self, number: int, record: dict[str, Any]) -> None:
            super().append(number, record)
            if self.num_done == 10:
                others_done.set()

    monkeypatch.setattr(compiler, "compile_grammar", compile_late)
    lines: list[Any] = [{"prompt": "x", "structured_outputs": {"choice": ["late"]}}]
    lines += [{"prompt": "y", "structured_outputs": {"choice": ["soon"]}}]
    lines += [{"prompt": "z"}] * 9
    with Watched(tmp_path / "out") as results:
        source = write(tmp_path / "in", lines)
        done = BatchRun(llm.engine, source, results, progress=False, defaults=DEFAULTS).run()
    assert (done.num_done, done.num_failed) == (11, 0)
    records = read(tmp_path / "out")
    assert (records[-1]["line"], records[-1]["text"]) == (1, "late")
    assert next(record["text"] for record in records if record["line"] == 2) == "soon"


def test_the_bar_tells_lines_time_left_and_tokens_a_second(
    llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in", [{"prompt": f"{n}"} for n in range(12)])
    run(llm, source, tmp_path / "out", progress=True)
    shown = capsys.readouterr().err
    assert re.search(r"12/12 \[\d\d:\d\d<00:00, .*[\d.]+ output tok/s\]", shown), shown
    kept = (tmp_path / "out").read_text().splitlines(keepends=True)[:9]
    (tmp_path / "out").write_text("".join(kept))
    assert run(llm, source, tmp_path / "out", progress=True).num_found == 9
    assert "12/12" in capsys.readouterr().err


def test_a_killed_batch_goes_on_with_nothing_lost_or_doubled(
    tiny_model: Path, tmp_path: Path
) -> None:
    lines = [{"prompt": f"p{i}", "max_tokens": 24, "ignore_eos": True} for i in range(400)]
    source, output = write(tmp_path / "in", lines), tmp_path / "out"
    command = [
        *(sys.executable, "-m", "octavo.server.cli.main", "generate", "--quiet"),
        *("--model", str(tiny_model), "--input", str(source), "--output", str(output)),
        *("--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--warm-up", "coarse"),
        *("--max-model-len", "128", "--num-kv-pages", "40"),
    ]
    with subprocess.Popen(command) as popen:
        end_s = time.monotonic() + WAIT_S
        while not output.exists() or output.read_bytes().count(b"\n") < 9:
            assert popen.poll() is None
            assert time.monotonic() < end_s
            time.sleep(0.002)
        popen.send_signal(signal.SIGKILL)
    kept = [line for line in output.read_bytes().split(b"\n")[:-1] if line]
    assert 9 <= len(kept) < 400
    subprocess.run(command, check=True, timeout=WAIT_S)
    records = output.read_bytes().splitlines()
    assert records[: len(kept)] == kept
    found = [json.loads(record)["line"] for record in records]
    assert sorted(found) == list(range(1, 401))


def test_the_options_go_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from octavo.server.cli.main import main

    (tmp_path / "in").write_text('"a"\n')
    for arguments, field in (
        (["--input", str(tmp_path / "in")], "output"),
        (["--prompt", "x", "--output", str(tmp_path / "out")], "output"),
        (["--input", str(tmp_path / "none"), "--output", str(tmp_path / "out")],
         "input = .*none.* can be read"),
        (["--input", str(tmp_path / "in"), "--output", str(tmp_path / "in"), "--overwrite"],
         "another file"),
    ):  # fmt: skip
        assert main(["generate", *arguments]) == 2
        assert re.search(field, capsys.readouterr().err)
    assert (tmp_path / "in").read_text() == '"a"\n'
    assert not (tmp_path / "out").exists()


def test_the_example_batch_of_the_docs_is_answered(llm: LLM, tmp_path: Path) -> None:
    from octavo.server.cli import generate

    [shell] = examples("batch.md", "sh")
    *heredoc, command = shell.splitlines()
    subprocess.run(["bash", "-ec", "\n".join(heredoc)], cwd=tmp_path, check=True)
    parser = argparse.ArgumentParser()
    generate.add_parser(parser.add_subparsers())
    args = parser.parse_args(shlex.split(command)[1:])
    source = tmp_path / args.input
    source.write_text(source.read_text().replace("smollm2-135m", "tiny"))
    done = run(llm, source, tmp_path / args.output)
    assert (done.num_done, done.num_bad, done.num_failed) == (4, 0, 0)
    assert {record.get("custom_id") for record in read(tmp_path / args.output)} == {
        "a", "b", "c", None
    }  # fmt: skip


def test_the_example_of_structured_outputs_of_the_docs_runs(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    [code] = examples("structured_output.md")
    [made] = re.findall(r"^llm = .*\n", code, re.M)
    code = code.replace(made, "").replace("temperature=0,", "temperature=1.0, seed=1,")
    exec(code, {"llm": llm})
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2} stop", lines[-3])
    assert lines[-2] in ("positive stop", "negative stop")
    assert re.fullmatch(r"\d{1,3}(\+\d{1,3})+ stop", lines[-1])


def test_the_example_of_the_readme_runs(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    [code] = examples("../README.md")
    [made] = re.findall(r"^llm = .*\n", code, re.M)
    exec(code.replace(made, ""), {"llm": llm})
    # A random model's text may hold anything but what was printed before it.
    printed = capsys.readouterr().out
    assert printed.startswith("The capital of France is -> ")
    assert "Water boils at -> " in printed


def test_the_notebook_runs(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    notebook = json.loads((DOCS.parent / "notebooks" / "batch_inference.ipynb").read_text())
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    space: dict[str, Any] = {"llm": llm}
    for cell in cells:
        code = re.sub(r"^llm = LLM\(.*\)$", "", cell, flags=re.M)
        exec(code, space)
    first, second = space["first"], space["second"]
    assert (first.num_done, first.num_bad, first.num_found) == (21, 1, 0)
    assert 0 < second.num_done < 21
    assert second.num_done + second.num_bad + second.num_found == 22
    assert len(read(tmp_path / "results.jsonl")) == 22
    sentiments = [line.split()[0] for line in capsys.readouterr().out.splitlines()[:4]]
    assert set(sentiments) <= {"positive", "negative", "neutral"}
