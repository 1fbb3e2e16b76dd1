"""A killed writer loses no result that was there, and none is there twice."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.engine.errors import InvalidRequestError
from octavo.server.batch.results import ResultsFile, count_lines, result_id

WRITER = """
import sys
from octavo.server.batch.results import ResultsFile
with ResultsFile(sys.argv[1]) as results:
    print("open", flush=True)
    for number in range(1, int(sys.argv[2]) + 1):
        if not results.is_done(number):
            results.append(number, {"line": number, "text": "x" * (number % 700)})
"""


def numbers(path: Path) -> list[int]:
    return [json.loads(line)["line"] for line in path.read_bytes().splitlines()]


def test_every_line_is_there_once_however_often_the_writer_is_killed(tmp_path: Path) -> None:
    path, num_lines = tmp_path / "results.jsonl", 60_000
    command = [sys.executable, "-c", WRITER, str(path), str(num_lines)]
    num_killed = 0
    for attempt in range(6):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "open\n"
            before = path.stat().st_size
            while path.stat().st_size < before + 100_000 * (attempt + 1):
                if writer.poll() is not None:
                    break
            writer.send_signal(signal.SIGKILL)
        num_killed += writer.returncode == -signal.SIGKILL
        # What a crash may leave at the end of a file.
        with path.open("ab") as file:
            file.write(b'{"line": 59999, "te'[: attempt * 4])
    assert num_killed >= 3
    subprocess.run(command, check=True, capture_output=True)
    assert sorted(numbers(path)) == list(range(1, num_lines + 1))


def test_a_result_that_was_cut_off_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(b'{"line":3,"text":"a"}\n{"line":1,"te')
    with ResultsFile(path) as results:
        assert results.num_done == 1
        assert results.is_done(3)
        assert not results.is_done(1)
        assert not results.is_done(10**9)
        results.append(1, {"line": 1})
        assert results.is_done(1)
    assert numbers(path) == [3, 1]


def test_openais_results_are_found_by_their_id(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps({"id": result_id(7), "custom_id": "seven"}) + "\n")
    with ResultsFile(path) as results:
        assert results.is_done(7)
        assert results.names == {7: "seven"}


@pytest.mark.parametrize("content", [b"hello\n", b"[1]\n", b'{"line":0}\n', b'{"id":"x-1"}\n'])
def test_another_file_is_not_written_to(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(InvalidRequestError, match="output"):
        ResultsFile(path)
    assert path.read_bytes() == content
    with ResultsFile(path, overwrite=True) as results:
        assert results.num_done == 0
    assert path.read_bytes() == b""


def test_two_runs_do_not_write_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with ResultsFile(path), pytest.raises(InvalidRequestError, match="no other run"):
        ResultsFile(path)
    ResultsFile(path).close()


def test_lines_are_counted_with_and_without_a_last_newline(tmp_path: Path) -> None:
    path = tmp_path / "input"
    for content, num_lines in ((b"", 0), (b"a", 1), (b"a\n", 1), (b"a\n\nb", 3)):
        path.write_bytes(content)
        assert count_lines(path) == num_lines


def test_a_million_results_take_little_memory_to_remember(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with path.open("w") as file:
        file.writelines(f'{{"line":{number}}}\n' for number in range(1, 200_001))
    with ResultsFile(path) as results:
        assert results.num_done == 200_000
        assert len(results._done) <= 64_000
        assert len(results.names) == 1000
