"""Tools in Python, in the lines of a batch, and in the documents' examples."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, InvalidConfigError, InvalidRequestError, SamplingParams
from octavo.engine.config import EngineConfig
from octavo.engine.text.assistant import turn_plan
from octavo.engine.text.assistant.formats import FORMATS
from octavo.engine.text.assistant.reasoning import REASONING_FORMATS
from octavo.engine.text.assistant.tool_grammar import tool_grammar
from octavo.server.batch.results import ResultsFile
from octavo.server.batch.run import BatchRun
from tests.examples import DOCS, examples, run_example

TEMPLATE = DOCS / "hermes.jinja"
ASK = [{"role": "user", "content": "Do something."}]
PICK = {
    "type": "function",
    "function": {
        "name": "pick",
        "parameters": {
            "type": "object",
            "properties": {"one": {"enum": ["ä", "b"]}},
            "required": ["one"],
            "additionalProperties": False,
        },
    },
}
PARAMS = SamplingParams(max_tokens=200, seed=1)


@pytest.fixture(scope="module")
def llm(tools_model: Path) -> Iterator[LLM]:
    llm = LLM(
        tools_model, served_model_name="tiny", progress=False, max_num_seqs=4,
        max_num_batched_tokens=64, max_model_len=2048, num_kv_pages=300, warm_up="coarse",
        chat_template=str(TEMPLATE),
    )  # fmt: skip
    yield llm
    llm.close()
    llm.engine.check_integrity()


def test_a_chats_completions_carry_their_messages(llm: LLM) -> None:
    outputs = llm.chat(
        [ASK, ASK], [PARAMS, PARAMS.replace(seed=2)], tools=[PICK], tool_choice="required",
        parallel_tool_calls=False, use_tqdm=False,
    )  # fmt: skip
    ids = set()
    for output in outputs:
        [completion] = output.outputs
        assert completion.text.startswith("<tool_call>\n")
        assert completion.message is not None
        [call] = completion.message.tool_calls
        ids.add(call.id)
        assert (completion.message.content, call.name) == (None, "pick")
        assert json.loads(call.arguments)["one"] in ("ä", "b")
    assert len(ids) == 2


def test_conversations_alike_share_the_grammar_of_their_tools(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def noted(*args: Any) -> str | None:
        made.append(args)
        return tool_grammar(*args)

    monkeypatch.setattr(turn_plan, "tool_grammar", noted)
    llm.chat([ASK] * 5, PARAMS.replace(max_tokens=2), tools=[PICK], use_tqdm=False)
    assert len(made) == 1
    each = [PARAMS.replace(max_tokens=2, seed=seed) for seed in range(3)]
    outputs = llm.chat([ASK] * 3, each, tools=[PICK], use_tqdm=False)
    assert len(made) == 4
    assert len({output.outputs[0].text for output in outputs}) > 1


def test_a_chat_without_tools_has_a_message_of_words(llm: LLM) -> None:
    [output] = llm.chat(ASK, PARAMS.replace(max_tokens=8), use_tqdm=False)
    [completion] = output.outputs
    assert completion.message is not None
    assert completion.message.content == completion.text
    assert completion.message.tool_calls == ()
    assert (
        llm.generate("x", PARAMS.replace(max_tokens=2), use_tqdm=False)[0].outputs[0].message
        is None
    )


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            r"tools\[0\].function.name",
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
        ),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"chat_template": "{{ messages[0].content }}"}, "tools"),
        ({"sampling_params": PARAMS.replace(detokenize=False)}, "detokenize"),
    ],
    ids=["name", "choice", "none", "template", "no text"],
)
def test_bad_input_is_refused_by_name(llm: LLM, change: dict[str, Any], field: str) -> None:
    ask = {"tools": [PICK], "use_tqdm": False} | change
    with pytest.raises(InvalidRequestError, match=f"^{field} = "):
        llm.chat(ASK, **ask)


def test_lines_of_a_batch_call_tools(llm: LLM, tmp_path: Path) -> None:
    body = {
        "messages": ASK, "tools": [PICK], "tool_choice": "required", "parallel_tool_calls": False,
        "max_tokens": 200, "seed": 1,
    }  # fmt: skip
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    bad = line | {"body": body | {"tool_choice": "x"}}
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(line) + "\n" + json.dumps(bad) + "\n")
    with ResultsFile(output) as results:
        BatchRun(
            llm.engine, source, results, defaults=PARAMS, on_error="skip", progress=False
        ).run()
    records = [json.loads(text) for text in output.read_text().splitlines()]
    good, refused = sorted(records, key=lambda record: record["response"]["status_code"])
    [choice] = good["response"]["body"]["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "pick"
    assert refused["response"]["body"]["error"]["param"] == "tool_choice"


def test_the_example_in_python_runs(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    code = examples("tools.md")[1]
    [made] = re.findall(r"^llm = .*\n", code, re.M)
    exec(code.replace(made, ""), {"llm": llm})
    assert capsys.readouterr().out == "now {} None\n"


def test_the_example_over_http_runs(tools_live: Any) -> None:
    shown = run_example(examples("tools.md")[0], tools_live)
    assert shown.startswith("tool_calls get_weather")


def test_the_example_of_thoughts_runs(
    tools_model: Path,
    tiny_args: tuple[str, ...],
    server_process: Callable[..., Any],
    tmp_path: Path,
) -> None:
    args = ("--model", str(tools_model), *tiny_args, "--reasoning-parser", "qwen3")
    with server_process(*args, log=tmp_path / "log") as process:
        [code] = examples("reasoning.md")
        shown = run_example(code, process)
        assert re.search(r"answer: .*\n\d+ tokens of thought", shown, re.S)


@pytest.mark.parametrize(
    ("page", "formats"), [("tools.md", FORMATS), ("reasoning.md", REASONING_FORMATS)]
)
def test_every_format_is_on_its_page(page: str, formats: Any) -> None:
    table = (DOCS / page).read_text("utf-8").partition("## Formats")[2]
    assert re.findall(r"^\| `(\w+)` \|", table, re.M) == [each.name for each in formats]


@pytest.mark.parametrize("name", ["tool_call_parser", "reasoning_parser"])
def test_a_parser_that_is_not_known_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(InvalidConfigError, match=rf"^{name} = 'x' .*auto, none, .*mistral"):
        EngineConfig(**{name: "x"})  # type: ignore[arg-type]
    for known in ("auto", "none", "mistral"):
        EngineConfig(**{name: known})  # type: ignore[arg-type]


@pytest.mark.parametrize("source", ["no/such/file", "{% if %}"])
def test_a_chat_template_that_is_none_is_refused(source: str) -> None:
    from octavo.engine.early_checks import check_early

    with pytest.raises(InvalidConfigError, match=r"^chat_template = "):
        check_early(EngineConfig(chat_template=source))
