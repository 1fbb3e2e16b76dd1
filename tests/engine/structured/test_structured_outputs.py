"""Texts keep to their grammar, whoever is in the batch, and nobody else's change."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from octavo import LLM, InvalidRequestError, RequestOutput, SamplingParams, StructuredOutputsParams
from octavo.engine.observability.event_log import start_log
from octavo.engine.simulation.replay import replay
from octavo.engine.structured import compiler
from octavo.engine.structured.compiler import GrammarCompiler
from octavo.engine.structured.turn_grammar import TurnGrammar

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
NESTED = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "boolean"},
                "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/leaf"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        },
        "leaf": {"type": "string", "pattern": "^[a-f]{2,4}$"},
    },
    "$ref": "#/$defs/node",
}
ARITHMETIC = 'start: number (("+" | "*") number)~1..3\nnumber: /[0-9]{1,3}/'
GBNF = 'root ::= "<" [a-c]+ ">" "!"?'
REGEXES = (r"[0-9]{3}-[a-f]{4}", r"(yes|no), (it|he) is\.", r"[А-Я][а-я]{2,5} \d{1,2}")
FREE = ("the quick brown", "hello there", "0123456789" * 3)


def grammar(**fields: Any) -> dict[str, Any]:
    if {"json", "json_object"} & fields.keys():
        fields["disable_any_whitespace"] = True
    return fields


CASES: tuple[tuple[dict[str, Any], Any], ...] = (
    (grammar(json=PERSON), PERSON),
    (grammar(json=json.dumps(NESTED)), NESTED),
    *((grammar(regex=regex), re.compile(regex)) for regex in REGEXES),
    (
        grammar(choice=['"quoted" \\ é\n', "yes", "no way"]),
        re.compile(r'"quoted" \\ é\n|yes|no way'),
    ),
    (grammar(grammar=ARITHMETIC), re.compile(r"\d{1,3}([+*]\d{1,3}){1,3}")),
    (grammar(grammar='?start: "a" | x\n!x: "b"'), re.compile("a|b")),
    (grammar(grammar=GBNF), re.compile(r"<[a-c]+>!?")),
)


def check(output: RequestOutput, wanted: Any) -> None:
    for completion in output.outputs:
        if completion.finish_reason != "stop":
            continue  # cut off by its limit: its beginning follows the grammar, as the mask says
        if isinstance(wanted, re.Pattern):
            assert wanted.fullmatch(completion.text), completion.text
        else:
            jsonschema.validate(json.loads(completion.text), wanted)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    llm = LLM(
        str(tiny_model),
        progress=False,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        num_kv_pages=64,
        block_size=8,
        num_decode_steps=4,
        fail_on_compile=True,
        warm_up="coarse",
    )
    yield llm
    llm.close()
    llm.engine.check_integrity()
    assert llm.engine.masks.num_live == 0
    assert llm.engine.load().compiles_after_ready == 0


def params(structured: dict[str, Any] | None, **changes: Any) -> SamplingParams:
    values: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 120}
    return SamplingParams(**{**values, **changes}, structured_outputs=structured)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_text_that_ends_is_in_its_language(llm: LLM, temperature: float) -> None:
    asked = [params(g, temperature=temperature, seed=i) for i, (g, _) in enumerate(CASES)]
    outputs = llm.generate(["make: "] * len(CASES), asked, use_tqdm=False)
    for output, (_, wanted) in zip(outputs, CASES, strict=True):
        check(output, wanted)
    # A random model ends most of them; a greedy one may repeat itself within a string for ever.
    ended = sum(output.outputs[0].finish_reason == "stop" for output in outputs)
    assert ended >= len(CASES) - 2


def test_free_requests_in_the_batch_keep_their_tokens(llm: LLM) -> None:
    free = [params(None, seed=11 + i, max_tokens=40) for i in range(len(FREE))]
    free[0] = free[0].replace(temperature=0.0)
    alone = llm.generate(list(FREE), free, use_tqdm=False)
    gated = [params(g, seed=20 + i) for i, (g, _) in enumerate(CASES)]
    gated_alone = [llm.generate("x", p, use_tqdm=False)[0] for p in gated]
    prompts = [*FREE, *["x"] * len(gated)]
    together = llm.generate(prompts, [*free, *gated], use_tqdm=False)
    for before, after in zip([*alone, *gated_alone], together, strict=True):
        assert after.outputs[0].token_ids == before.outputs[0].token_ids
    for output, (_, wanted) in zip(together[len(FREE) :], CASES, strict=True):
        check(output, wanted)


def test_penalties_bias_and_several_completions_stay_within_the_grammar(llm: LLM) -> None:
    asked = params(
        grammar(regex=REGEXES[0]),
        n=4,
        repetition_penalty=1.3,
        presence_penalty=1.0,
        logit_bias={20: 100.0, 60: -100.0},
        logprobs=2,
    )
    output = llm.generate("x", asked, use_tqdm=False)[0]
    assert {c.finish_reason for c in output.outputs} == {"stop"}
    check(output, re.compile(REGEXES[0]))


def test_stop_strings_and_limits_end_a_text_inside_its_grammar(llm: LLM) -> None:
    asked = [
        params(grammar(regex="[ab]{3}-[ab]{50}"), stop="-"),
        params(grammar(regex="[ab]{3}-[ab]{50}"), max_tokens=5),
        params(grammar(regex="[ab]{3}-[ab]{50}"), stop_token_ids=[llm.tokenizer.encode("-")[0]]),
    ]
    stopped, cut, token = (o.outputs[0] for o in llm.generate(["x"] * 3, asked, use_tqdm=False))
    assert re.fullmatch("[ab]{3}", stopped.text)
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", "-")
    assert re.fullmatch("[ab]{3}-[ab]", cut.text)
    assert cut.finish_reason == "length"
    assert re.fullmatch("[ab]{3}", token.text)


def test_preempted_texts_go_on_where_they_were_and_the_run_replays(
    llm: LLM, make_llm: Any, tmp_path: Path
) -> None:
    regex = "[a-f]{60}[0-9]"
    asked = [params(grammar(regex=regex), seed=i) for i in range(6)]
    expected = [llm.generate("x" * 20, p, use_tqdm=False)[0].outputs[0] for p in asked]
    small = make_llm(block_size=8, num_kv_pages=24, watermark=0.0, warm_up="coarse")
    path = tmp_path / "log.jsonl"
    with start_log(small.engine.core, small.engine.config, path):
        found = small.generate(["x" * 20] * 6, asked, use_tqdm=False)
        small.generate(list(FREE), params(None, max_tokens=30), use_tqdm=False)
    small.engine.core.log = None
    assert small.engine.load().num_preemptions > 0
    for completion, output in zip(expected, found, strict=True):
        assert output.outputs[0].token_ids == completion.token_ids
        check(output, re.compile(regex))
    replayed = replay(path)
    assert replayed.difference is None
    assert replayed.num_plans > 60


def test_the_vocabulary_is_read_ahead_and_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = GrammarCompiler(llm.tokenizer, vocab_size=258, eos_token_ids=(1,))
    make, num_made = grammars._make_vocabulary, 0

    def count() -> Any:
        nonlocal num_made
        num_made += 1
        return make()

    monkeypatch.setattr(grammars, "_make_vocabulary", count)
    grammars.prepare()
    assert num_made == 1
    grammars.compile(StructuredOutputsParams(regex="a"))
    grammars.prepare()
    assert num_made == 1
    grammars.close()
    GrammarCompiler(llm.tokenizer, vocab_size=258, eos_token_ids=()).prepare()


def test_cancelled_and_stopped_sequences_leave_no_matcher(llm: LLM) -> None:
    submission = llm.engine.inputs.process(
        "gone", "x", params(grammar(regex="[a-z]{200}")), now_s=llm.engine.clock.now_s()
    )
    llm.engine.submit(submission)
    for _ in range(4):
        llm.engine.step()
    assert llm.engine.masks.num_live == 1
    assert llm.engine.abort(submission.request_id)
    while llm.engine.has_unfinished:
        llm.engine.step()
    assert llm.engine.masks.num_live == 0


@pytest.mark.parametrize(
    ("structured", "field", "reason"),
    [
        ({}, "structured_outputs", "exactly one of"),
        ({"regex": "a", "choice": ["a"]}, "structured_outputs", "exactly one of"),
        ({"regexp": "a"}, "structured_outputs", "fields json"),
        ({"regex": "(a|b"}, "structured_outputs.regex", "unclosed group"),
        ({"regex": "a" * 20_000}, "structured_outputs.regex", "1 to 16384"),
        ({"json": "{"}, "structured_outputs.json", "a JSON schema"),
        ({"json": {"type": "nothing"}}, "structured_outputs.json", "Invalid type"),
        ({"json": {"$ref": "http://example.test/a"}}, "structured_outputs.json", "compiled"),
        ({"json": "[" * 90_000}, "structured_outputs.json", "deep"),
        ({"json": False}, "structured_outputs.json", "match"),
        ({"choice": []}, "structured_outputs.choice", "1 to 4096"),
        ({"choice": "ab"}, "structured_outputs.choice", "a list"),
        ({"grammar": "start: nothing"}, "structured_outputs.grammar", "compiled"),
        ({"grammar": "begin ::="}, "structured_outputs.grammar", "compiled"),
        ({"grammar": "start: a\na: a"}, "structured_outputs.grammar", "compiled"),
        ({"json": {"$ref": "#"}}, "structured_outputs.json", "straight back to themselves"),
        ({"regex": "a", "whitespace_pattern": 3}, "structured_outputs.whitespace_pattern", "1 to"),
    ],
)
def test_a_bad_grammar_is_refused_by_name(
    llm: LLM, structured: dict[str, Any], field: str, reason: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate("x", params(structured), use_tqdm=False)
    assert caught.value.field == field
    assert reason in str(caught.value)


def test_a_text_that_nothing_matches_is_refused_behind_what_may_be_empty(llm: LLM) -> None:
    """The library computes the first mask of the whole for ever."""
    turn = TurnGrammar(root="start: BREAKS answer\nBREAKS: /\\n*/\nanswer: @content")
    asked = StructuredOutputsParams(grammar="start: a\na: a", turn=turn)
    with pytest.raises(InvalidRequestError, match=r"structured_outputs\.grammar"):
        llm.engine.grammars.compile(asked)
    good = StructuredOutputsParams(grammar='start: "a"', turn=turn)
    assert llm.engine.grammars.compile(good).first_mask.any()


def test_deep_and_long_schemas_are_refused() -> None:
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(60):
        deep = {"type": "object", "properties": {"a": deep}}
    for schema in (deep, json.dumps(deep), {"enum": ["x" * 1000 + str(i) for i in range(200)]}):
        with pytest.raises(InvalidRequestError, match=r"structured_outputs\.json"):
            params({"json": schema})


def test_a_grammar_that_takes_too_long_is_refused_and_the_next_is_not(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, compile_grammar = threading.Event(), compiler.compile_grammar

    def compile_late(asked: StructuredOutputsParams, *rest: Any) -> Any:
        if asked.choice == ("late",):
            assert ended.wait(60)
        return compile_grammar(asked, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(compiler, "compile_grammar", compile_late)
        patch.setattr(compiler, "COMPILE_TIMEOUT_S", 0.05)
        with pytest.raises(InvalidRequestError, match="compiled within") as caught:
            llm.engine.grammars.compile(StructuredOutputsParams(choice=["late"]))
        assert caught.value.field == "structured_outputs.choice"
        patch.setattr(compiler, "COMPILE_TIMEOUT_S", 60.0)
        [output] = llm.generate("x", params({"choice": ["soon"]}), use_tqdm=False)
        ended.set()
    assert output.outputs[0].text == "soon"
    # Asked for again, it is there.
    [output] = llm.generate("x", params({"choice": ["late"]}), use_tqdm=False)
    assert output.outputs[0].text == "late"


@pytest.mark.parametrize(
    "changes",
    [{"min_tokens": 2}, {"ignore_eos": True}, {"allowed_token_ids": [5]}, {"bad_words": ["a"]}],
)
def test_what_could_forbid_all_that_a_grammar_allows_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(changes))):
        params({"regex": "a"}, **changes)


def test_a_grammar_too_complex_to_follow_ends_its_request_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    from octavo.engine.structured import grammar as module

    monkeypatch.setattr(module, "MASK_ITEMS", 60)
    asked = params({"grammar": 'start: e\ne: "a" | e e | e e e | "b" e'}, max_tokens=100)
    outputs = llm.generate(["x", "y"], [asked, params(None)], use_tqdm=False)
    assert outputs[0].outputs[0].finish_reason == "failed"
    assert isinstance(outputs[0].error, InvalidRequestError)
    assert "follow" in str(outputs[0].error)
    assert outputs[1].outputs[0].finish_reason in ("stop", "length")


OPEN_ANSWER = {
    "type": "object",
    "properties": {
        "yes": {"type": "boolean"},
        "why": {"type": "object", "properties": {"code": {"enum": [1, 2]}}, "required": ["code"]},
        "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3},
    },
    "required": ["yes", "why", "list"],
}
"""Of a size that nothing but white space and keys of its own can make long."""


@pytest.mark.parametrize("favourites", [" \n\t\r", '",', "\n ", 'abc"'], ids=range(4))
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_a_model_that_loves_space_and_new_keys_comes_to_an_end(
    llm: LLM, favourites: str, temperature: float
) -> None:
    tokens = {llm.tokenizer.encode(letter)[-1]: 100.0 for letter in favourites}
    grammar = {"json": OPEN_ANSWER, "disable_additional_properties": True}
    asked = params(grammar, logit_bias=tokens, temperature=temperature, max_tokens=460)
    [output] = llm.generate("answer: ", asked, use_tqdm=False)
    completion = output.outputs[0]
    assert completion.finish_reason == "stop", completion.text
    assert set(json.loads(completion.text)) == {"yes", "why", "list"}
    jsonschema.validate(json.loads(completion.text), OPEN_ANSWER)


@pytest.mark.parametrize("indent", [None, 0, 1, 2, 4, "\t"])
def test_json_may_be_written_as_people_indent_it(llm: LLM, indent: int | str | None) -> None:
    value = {"yes": True, "why": {"code": 1}, "list": [True, False, True]}
    text = json.dumps(value, indent=indent)
    grammar = {"json": OPEN_ANSWER, "disable_additional_properties": True}
    compiled = llm.engine.inputs.grammars.compile(StructuredOutputsParams(**grammar))
    matcher = compiled.matcher.deep_copy()
    assert matcher.consume_tokens(llm.tokenizer.encode(text)), text
    assert matcher.is_accepting()
