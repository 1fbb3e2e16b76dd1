"""The documentation's site: linked files outside docs/ come in, a broken link fails the build."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")

from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

ROOT = Path(__file__).resolve().parents[1]


class Repository:
    """A small repository with the settings and hooks of this one, without the API's rendering."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.site = path / "site"
        self.write("README.md", "# Home\n")
        self.write("docs/guide.md", "# Guide\n## When a step fails\n")
        self.write("tools/site_pages.py", "")
        shutil.copy(ROOT / "tools" / "site_pages.py", path / "tools")

    def write(self, name: str, text: str) -> None:
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        (self.path / name).write_text(text, "utf-8")

    def build(self) -> None:
        build(
            load_config(
                str(ROOT / "mkdocs.yml"),
                docs_dir=str(self.path / "docs"),
                site_dir=str(self.site),
                hooks=[str(self.path / "tools" / "site_pages.py")],
                plugins=[],
                theme="mkdocs",
                strict=True,
            )
        )

    def page(self, name: str) -> str:
        return (self.site / name / "index.html").read_text("utf-8")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_the_readme_is_the_home_page(repository: Repository) -> None:
    repository.write("README.md", "# Home\nSee [the guide](docs/guide.md#when-a-step-fails).\n")
    repository.build()
    assert 'href="guide/#when-a-step-fails"' in repository.page(".")


def test_linked_files_outside_docs_come_in_with_what_they_link_to(repository: Repository) -> None:
    repository.write("docs/kernels/README.md", "# Kernels\n[figures](../../results/README.md)\n")
    repository.write(
        "results/README.md", "# Results\n[run](run.md), [raw](run.json), [up](../docs/guide.md)\n"
    )
    repository.write("results/run.md", "# Run\n[the code](../engine/step.py)\n")
    repository.write("results/run.json", "{}\n")
    repository.write("engine/step.py", "pass\n")
    repository.write("results/other.md", "nobody links here\n")
    repository.build()
    assert 'href="../results/"' in repository.page("kernels")
    assert 'href="run/"' in repository.page("results")
    assert 'href="../guide/"' in repository.page("results")
    assert 'href="../../engine/step.py"' in repository.page("results/run")
    assert (repository.site / "results" / "run.json").read_text() == "{}\n"
    assert (repository.site / "engine" / "step.py").read_text() == "pass\n"
    assert not (repository.site / "results" / "other").exists()


def test_a_link_to_a_folder_leads_to_its_readme(repository: Repository) -> None:
    repository.write("docs/adr/README.md", "# Decisions\n")
    repository.write("README.md", "# Home\n[decisions](docs/adr/)\n")
    repository.build()
    assert 'href="adr/"' in repository.page(".")


@pytest.mark.parametrize(
    "target",
    ["none.md", "#nowhere", "../README.md#nowhere", "../engine/none.py", "../none/", "/guide.md"],
)
def test_a_broken_link_fails_the_build(repository: Repository, target: str) -> None:
    repository.write("docs/guide.md", f"# Guide\n[broken]({target})\n")
    with pytest.raises(Abort):
        repository.build()


def test_a_broken_link_of_a_page_outside_docs_fails_the_build(repository: Repository) -> None:
    repository.write("docs/guide.md", "# Guide\n[figures](../results/run.md)\n")
    repository.write("results/run.md", "# Run\n[broken](none.json)\n")
    with pytest.raises(Abort):
        repository.build()


def test_a_link_that_leaves_the_repository_fails_the_build(repository: Repository) -> None:
    repository.write("docs/guide.md", "# Guide\n[outside](../../outside.md)\n")
    (repository.path.parent / "outside.md").write_text("# Outside\n", "utf-8")
    with pytest.raises(Abort):
        repository.build()


def test_lists_start_within_a_paragraph_and_code_stays_as_it_is(repository: Repository) -> None:
    repository.write(
        "docs/guide.md",
        "# Guide\nTwo things:\n- one,\n  on two lines\n- two\n\n```\nusage:\n- not a list\n```\n",
    )
    repository.build()
    page = repository.page("guide")
    assert page.count("<li>") == 2 + page.partition("<h1")[0].count("<li>")
    assert "usage:\n- not a list" in page


def test_every_public_class_has_one_place_in_the_reference(repository: Repository) -> None:
    repository.build()
    assert "::: octavo.LLM" in repository.page("reference/octavo")
    clients = repository.page("reference/octavo.client")
    assert "::: octavo.client.OctavoClient" in clients
    assert "::: octavo.client.SamplingParams" not in clients
