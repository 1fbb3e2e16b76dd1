"""Special tokens and truncation of prompts, and prompts that end within their last message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.errors import InvalidRequestError
from octavo.engine.input.input_processor import InputProcessor
from octavo.engine.input.tokenization import Tokenization
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.text.tokenizer import Tokenizer

MAX_MODEL_LEN = 32
TEMPLATES = {
    "plain": "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    "trims": "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}",
    "twice": "{{ messages[-1].content }}{% for m in messages %}[{{ m.content }}]{% endfor %}!",
}


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_source(tiny_model)


@pytest.fixture(scope="module")
def process(tokenizer: Tokenizer) -> Any:
    inputs = InputProcessor(
        tokenizer, vocab_size=258, max_model_len=MAX_MODEL_LEN, eos_token_ids=(1,), seed=0
    )

    def process(prompt: Any, max_tokens: int | None, **tokenization: Any) -> Any:
        params = SamplingParams(max_tokens=max_tokens)
        how = Tokenization(**tokenization)
        return inputs.process("a", prompt, params, now_s=0.0, tokenization=how)

    return process


@given(
    length=st.integers(1, 80), most=st.integers(1, MAX_MODEL_LEN - 1),
    side=st.sampled_from(["left", "right"]), as_text=st.booleans(),
)  # fmt: skip
def test_a_prompt_is_cut_at_its_side(process, tokenizer, length, most, side, as_text):
    text = "".join(chr(ord("a") + place % 26) for place in range(length))
    ids = tokenizer.encode(text)
    made = process(
        text if as_text else ids, None, truncate_prompt_tokens=most, truncation_side=side
    )
    wanted = ids[-most:] if side == "left" else ids[:most]
    assert made.sequences[0].prompt_token_ids == wanted
    assert made.prompt == (text if as_text and len(ids) <= most else None)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_text_of_millions_of_characters_is_cut_before_it_is_tokenized(tokenizer, process, side):
    text = "".join(chr(ord("a") + place % 26) for place in range(3_000_000))
    how = Tokenization(truncate_prompt_tokens=9, truncation_side=side)
    assert len(how.shortened(text, 9, tokenizer)) < 10_000
    assert how.shortened(text, None, tokenizer) is text
    made = process(text, None, truncate_prompt_tokens=9, truncation_side=side)
    wanted = tokenizer.encode(text[-9:] if side == "left" else text[:9])
    assert made.sequences[0].prompt_token_ids == wanted


@pytest.mark.parametrize(("max_tokens", "kept"), [(None, 31), (1, 31), (10, 22), (31, 1)])
def test_minus_one_leaves_room_for_what_is_generated(process, max_tokens, kept):
    made = process("x" * 100, max_tokens, truncate_prompt_tokens=-1)
    assert len(made.sequences[0].prompt_token_ids) == kept


@pytest.mark.parametrize("most", [0, -2, MAX_MODEL_LEN, 10**20, True, 1.5])
def test_a_length_that_cannot_be_is_refused(process, most):
    with pytest.raises(InvalidRequestError, match="truncate_prompt_tokens"):
        process("abc", 4, truncate_prompt_tokens=most)


def test_without_truncation_a_long_prompt_is_refused(process):
    with pytest.raises(InvalidRequestError, match="prompt"):
        process("x" * 100, 4)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("content", ["The answer is", "ends in a space ", "", "</s>", "é\n\n"])
@pytest.mark.parametrize("as_parts", [False, True], ids=["text", "parts"])
def test_a_prompt_ends_where_its_last_message_does(tokenizer, template, content, as_parts):
    value = [{"type": "text", "text": content}] if as_parts else content
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": value}]
    text = tokenizer.apply_chat_template(
        messages, chat_template=TEMPLATES[template], add_generation_prompt=False,
        continue_final_message=True,
    )  # fmt: skip
    whole = tokenizer.apply_chat_template(
        messages, chat_template=TEMPLATES[template], add_generation_prompt=False
    )
    assert text.endswith(content)
    if template != "trims":
        assert whole.startswith(text)
    assert messages[-1]["content"] == value


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        [{"role": "user"}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": [{"type": "text"}]}],
        ["x"],
    ],
    ids=range(6),
)
def test_what_has_no_end_cannot_be_gone_on_with(tokenizer, messages):
    with pytest.raises(InvalidRequestError):
        tokenizer.encode_chat(messages, add_generation_prompt=False, continue_final_message=True)


def test_a_template_that_hides_the_message_is_refused(tokenizer):
    with pytest.raises(InvalidRequestError, match="continue_final_message"):
        tokenizer.encode_chat(
            [{"role": "user", "content": "x"}], chat_template="hello",
            add_generation_prompt=False, continue_final_message=True,
        )  # fmt: skip


def test_a_template_that_does_not_parse_is_the_requests_fault(tokenizer):
    with pytest.raises(InvalidRequestError, match="chat_template"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}], chat_template="{% if %}")


@pytest.fixture(scope="module", params=["$A", "<s> $A", "$A </s>", "<s> $A </s> </s>"])
def ended(request: Any, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer that puts special tokens around texts, and the library's own one."""
    backend = tokenizers.Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    backend.add_special_tokens(["<s>", "</s>"])
    special = [(name, backend.token_to_id(name)) for name in ("<s>", "</s>")]
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=request.param, special_tokens=special
    )
    directory = tmp_path_factory.mktemp("ended")
    backend.save(str(directory / "tokenizer.json"))
    for name in ("config.json", "tokenizer_config.json"):
        (directory / name).write_bytes((tiny_model / name).read_bytes())
    return Tokenizer.from_source(directory), backend


@given(text=st.text("ab é", min_size=1, max_size=60), most=st.integers(4, 70), plain=st.booleans())
def test_a_text_is_cut_to_a_models_limit_as_the_library_cuts_it(ended, text, most, plain):
    tokenizer, backend = ended
    how = Tokenization(add_special_tokens=not plain).cut_as_trained(most, tokenizer)
    whole = tokenizer.encode(text, add_special_tokens=not plain)
    backend.enable_truncation(most)
    assert how.cut(whole, most) == backend.encode(text, add_special_tokens=not plain).ids


def test_a_request_that_cuts_its_text_is_not_cut_by_a_models_limit(tokenizer):
    asked = Tokenization(truncate_prompt_tokens=9)
    assert asked.cut_as_trained(5, tokenizer) is asked
