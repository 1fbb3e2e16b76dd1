"""The index of benchmarks/results/: it is current, lists every file, and nothing useless stays."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.scripts import load_script

ROOT = Path(__file__).resolve().parents[1]
EPYC = "AMD EPYC, 2 cores"
XEON = "Intel(R) Xeon(R) Processor, 2 cores"


index = load_script(ROOT / "tools" / "index_results.py")


class Repository:
    """A repository with results of kinds that nobody has."""

    def __init__(self, path: Path) -> None:
        self.path = path
        subprocess.run(["git", "init", "--quiet"], cwd=path, check=True)

    def write(self, name: str, text: str) -> None:
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        (self.path / name).write_text(text, "utf-8")

    def result(
        self, name: str, machine: str = XEON, command: str = "python -m benchmarks.probe"
    ) -> None:
        said = {"machine": machine, "command": command}
        self.write(f"benchmarks/results/{name}.json", json.dumps(said))

    def newest(self) -> list[str]:
        results = index.read_results(self.path)
        return [r.name for r in results if index.is_newest(r, results)]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    monkeypatch.setitem(index.SHOWS, "probe", "what a probe finds")
    return Repository(tmp_path)


in_git = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="asks git for the files")


@in_git
def test_the_index_is_current() -> None:
    text = (ROOT / index.INDEX).read_text("utf-8")
    assert text == index.render(ROOT), "run python tools/index_results.py"


@in_git
def test_every_file_is_listed() -> None:
    text = (ROOT / index.INDEX).read_text("utf-8")
    folder = ROOT / index.RESULTS
    files = [
        Path(name).relative_to(index.RESULTS).as_posix()
        for name in index.repository_files(ROOT)
        if Path(name).is_relative_to(index.RESULTS) and Path(name) != index.INDEX
    ]
    assert files
    assert [file for file in files if f"]({file})" not in text] == []
    assert all((folder / file).is_file() for file in files)


@in_git
def test_the_table_of_machines_names_results_that_are_there() -> None:
    dated = {name for name in index.MACHINES if name not in index.SHOWS}
    assert dated <= {result.name for result in index.read_results(ROOT)}


@in_git
def test_no_result_stays_that_is_superseded_and_unquoted() -> None:
    assert index.stale(ROOT) == [], "remove them with git rm, or quote them"


def test_a_letter_marks_a_later_run_of_the_day(repository: Repository) -> None:
    for name in ("probe-2026-01-01-c", "probe-2026-01-02", "probe-2026-01-02-b"):
        repository.result(name)
    assert repository.newest() == ["probe-2026-01-02-b"]


def test_machines_and_variants_are_kinds_of_their_own(repository: Repository) -> None:
    repository.result("probe-2026-01-01", EPYC)
    repository.result("probe-2026-01-01-tails")
    repository.result("probe-2026-01-02")
    repository.result("probe-2026-01-03-epyc-tails", EPYC)
    assert repository.newest() == [
        "probe-2026-01-01",
        "probe-2026-01-01-tails",
        "probe-2026-01-02",
        "probe-2026-01-03-epyc-tails",
    ]


def test_two_generations_by_one_name_are_two_machines(repository: Repository) -> None:
    repository.result("probe-2026-11-22", EPYC)
    repository.result("probe-2026-11-23", EPYC)
    repository.result("probe-2026-11-24", EPYC)
    assert repository.newest() == ["probe-2026-11-22", "probe-2026-11-24"]


def test_a_comparison_is_superseded_by_one_of_the_same_engines_at_least(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compare(name: str, peers: str, cores: str = "0") -> None:
        repository.result(
            name, command=f"python benchmarks/peers/run.py --peers {peers} --cores {cores}"
        )

    monkeypatch.setitem(index.SHOWS, "probe", "engines: {covers}")
    compare("probe-2026-01-01", "octavo,vllm")
    compare("probe-2026-01-02-int8", "octavo,octavo-int8,vllm")
    compare("probe-2026-01-03-all", "octavo,transformers")
    compare("probe-2026-01-04-two-cores", "octavo,vllm", cores="0-1")
    compare("probe-2026-01-05", "octavo,vllm,octavo-int8")
    assert repository.newest() == [
        "probe-2026-01-03-all", "probe-2026-01-04-two-cores", "probe-2026-01-05",
    ]  # fmt: skip
    assert "engines: octavo, transformers, one core" in index.render(repository.path)


def test_an_older_result_stays_while_a_document_quotes_it(repository: Repository) -> None:
    for day in (1, 2, 3):
        repository.result(f"probe-2026-01-0{day}")
    repository.write("docs/page.md", "[figures](../benchmarks/results/probe-2026-01-02.json)\n")
    assert index.stale(repository.path) == ["probe-2026-01-01"]
    # A longer name is another result; the index and the script's tables quote nothing.
    repository.write("docs/other.md", "probe-2026-01-01-b, a-probe-2026-01-01\n")
    repository.write("benchmarks/results/README.md", "probe-2026-01-01\n")
    repository.write("tools/index_results.py", "probe-2026-01-01\n")
    assert index.stale(repository.path) == ["probe-2026-01-01"]
    text = index.render(repository.path)
    newest, _, older = text.partition("## Older")
    assert "probe-2026-01-03" in newest
    assert "probe-2026-01-03" not in older
    assert "probe-2026-01-02" in older


def test_results_that_quote_each_other_alone_do_not_keep_each_other(repository: Repository) -> None:
    for day in (1, 2, 3):
        repository.result(f"probe-2026-01-0{day}")
    repository.result(
        "probe-2026-01-01", command="python -m benchmarks.probe --as probe-2026-01-02"
    )
    repository.result(
        "probe-2026-01-02", command="python -m benchmarks.probe --as probe-2026-01-01"
    )
    assert index.stale(repository.path) == ["probe-2026-01-01", "probe-2026-01-02"]
    # One that stays keeps what it quotes, which keeps the other.
    repository.result(
        "probe-2026-01-03", command="python -m benchmarks.probe --as probe-2026-01-01"
    )
    assert index.stale(repository.path) == []


@pytest.mark.parametrize(
    ("file", "text", "machine", "command"),
    [
        (
            "probe-2026-11-24.json",
            '{"about": {"processor": "AMD EPYC", "command": "python -m a --out X"}}',
            "EPYC, Zen 4",
            "python -m a",
        ),
        (
            "probe-2026-11-24.json",
            '{"note": "two cores of an Intel Xeon; python -m benchmarks.a --n 1"}',
            "Xeon",
            "python -m benchmarks.a --n 1",
        ),
        (
            "probe-2026-11-24.md",
            "An Intel Xeon, faster than the EPYC\n\n    python a.py --x 1 \\\n      --y 2\n",
            "Xeon",
            "python a.py --x 1 --y 2",
        ),
        (
            "probe-2026-11-24/a.md",
            "`octavo bench a --rate 2`\n\nAn AMD EPYC, `b` beside it\n",
            "EPYC, Zen 4",
            "octavo bench a --rate 2",
        ),
    ],
)
def test_machine_and_command_are_read_from_the_files(
    repository: Repository, file: str, text: str, machine: str, command: str
) -> None:
    repository.write(f"benchmarks/results/{file}", text)
    repository.write("benchmarks/results/probe-2026-11-24/plot.svg", "<svg/>")
    [result] = index.read_results(repository.path)
    assert (result.machine, result.command) == (machine, command)
    assert len(result.files) == 2


def test_a_result_that_says_nothing_of_itself_is_refused_by_name(repository: Repository) -> None:
    repository.write("benchmarks/results/probe-2026-01-01.json", '{"command": "python -m a"}')
    with pytest.raises(ValueError, match=r"probe-2026-01-01.*machine.*MACHINES"):
        index.read_results(repository.path)
    repository.write("benchmarks/results/probe-2026-01-01.json", '{"machine": "Xeon"}')
    with pytest.raises(ValueError, match=r"probe-2026-01-01.*command.*COMMANDS"):
        index.read_results(repository.path)
    repository.path.joinpath("benchmarks/results/probe-2026-01-01.json").unlink()
    repository.result("unknown-2026-01-01")
    with pytest.raises(ValueError, match=r"unknown-2026-01-01.*SHOWS.*'unknown'"):
        index.render(repository.path)
