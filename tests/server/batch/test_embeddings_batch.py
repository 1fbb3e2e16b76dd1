"""Files of texts to embed: vectors out, with a batch's progress, resume and error lines."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.server.cli.main import main

OPTIONS = [
    *("--task", "embed", "--served-model-name", "tiny", "--max-num-seqs", "4", "--max-model-len"),
    *("128", "--max-num-batched-tokens", "32", "--num-kv-pages", "40", "--warm-up", "coarse"),
]
TOLERANCE = 1e-5


def openai(name: str, **body: Any) -> dict[str, Any]:
    body = {"model": "tiny"} | body
    return {"custom_id": name, "method": "POST", "url": "/v1/embeddings", "body": body}


GOOD: list[Any] = [
    "a text",
    {"prompt": "abc", "custom_id": "one", "pooling": "mean", "priority": "low"},
    {"prompt_token_ids": [50, 60, 70], "dimensions": 8, "normalize": False},
    openai("two", input=["a text", "abc"]),
    openai("three", input="abc", pooling="mean", encoding_format="base64"),
]
BAD: list[tuple[Any, str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": "a", "temperature": 0.5}, "temperature"),
    ({"messages": [{"role": "user", "content": "hi"}]}, "prompt"),
    ({"prompt": "a", "pooling": "most"}, "pooling"),
    ({"prompt": "a", "dimensions": 10**6}, "dimensions"),
    ({"prompt": "a", "prompt_name": "query"}, "prompt_name"),
    ({"prompt": "a" * 200}, "prompt"),
    (openai("x", input=[]), "input"),
    (openai("x", input="a", dimensions=10**6), "dimensions"),
    ({**openai("x"), "url": "/v1/completions", "body": {"prompt": "a"}}, "task"),
]


def read(path: Path) -> dict[int, dict[str, Any]]:
    records = map(json.loads, path.read_text().splitlines())
    return {
        record.get("line") or int(record["id"].rpartition("_")[2]): record for record in records
    }


def test_a_file_of_texts_becomes_a_file_of_vectors(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [*GOOD, *(bad for bad, _ in BAD)]
    source.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    argv = ["generate", "--model", str(tiny_model), "--input", str(source), "--output"]
    argv += [str(output), *OPTIONS, "--on-error", "skip"]
    assert main(argv) == 0
    told = capsys.readouterr().err
    assert "Embedding" in told
    assert f"{len(GOOD)} lines answered, {len(BAD)} with an error" in told
    records = read(output)
    for number, (_, field) in enumerate(BAD, len(GOOD) + 1):
        assert f"skipped line {number}: {field}" in told
        assert "error" in json.dumps(records[number])
        assert "embedding" not in records[number]
    first = np.array(records[1]["embedding"])
    assert np.linalg.norm(first) == pytest.approx(1, abs=1e-6)
    assert records[1]["usage"] == {"prompt_tokens": 6}
    assert records[2]["custom_id"] == "one"
    assert len(records[3]["embedding"]) == 8
    body = records[4]["response"]["body"]
    assert [item["index"] for item in body["data"]] == [0, 1]
    np.testing.assert_allclose(body["data"][0]["embedding"], first, rtol=0, atol=TOLERANCE)
    [item] = records[5]["response"]["body"]["data"]
    vector = np.frombuffer(base64.b64decode(item["embedding"]), "<f4")
    np.testing.assert_allclose(vector, records[2]["embedding"], rtol=0, atol=TOLERANCE)

    kept = output.read_text().splitlines(keepends=True)[:3]  # as if it had been killed here
    output.write_text("".join(kept) + '{"line": 9, "embedd')
    assert main(argv) == 0
    assert output.read_text().startswith("".join(kept))
    assert read(output).keys() == records.keys()
    assert "3 by an earlier run" in capsys.readouterr().err


def test_prompts_of_the_command_line_are_not_embedded(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--model", str(tiny_model), "a text", *OPTIONS]) == 2
    assert "together with --input and --output" in capsys.readouterr().err
