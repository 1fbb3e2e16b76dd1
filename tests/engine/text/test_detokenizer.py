from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from octavo.engine.text.detokenizer import IncrementalDetokenizer
from octavo.engine.text.gguf_tokenizer import build_gguf_tokenizer
from octavo.engine.text.token_bytes import BYTE_OF_CHAR
from octavo.engine.text.tokenizer import Tokenizer
from octavo.engine.text.tokenizer_parts import TokenizerParts

# Where each vocabulary keeps its single bytes and its special tokens, to meet them often.
_BYTES = {49152: range(17, 270), 262144: range(238, 494)}
_SPECIAL = {49152: range(17), 262144: range(5)}


@st.composite
def _token_ids(draw: st.DrawFn, vocab_size: int) -> list[int]:
    anything = st.integers(0, vocab_size + 2)
    one_byte = st.sampled_from(_BYTES[vocab_size])
    special = st.sampled_from(_SPECIAL[vocab_size])
    return draw(st.lists(st.one_of(anything, one_byte, one_byte, special), max_size=30))


def _in_pieces(tokenizer: Tokenizer, ids: list[int], sizes: list[int], skip: bool) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    text = ""
    while ids:
        size = sizes[len(ids) % len(sizes)]
        if size == 1:
            text += detokenizer.append_one(ids[0])
        else:
            text += detokenizer.append(ids[:size])
        ids = ids[size:]
    return text + detokenizer.flush()


@given(data=st.data(), skip=st.booleans())
def test_pieces_joined_are_the_text_decoded_at_once(
    packaged: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    ids = data.draw(_token_ids(packaged.vocab_size))
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    assert _in_pieces(packaged, ids, sizes, skip) == packaged.decode(ids, skip_special_tokens=skip)


@given(data=st.data(), skip=st.booleans())
def test_one_token_at_a_time_gives_what_many_at_once_give(
    packaged: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    ids = data.draw(_token_ids(packaged.vocab_size))
    for _ in range(2):  # the second time texts are looked up
        text = _in_pieces(packaged, ids, [1], skip)
        assert text == packaged.decode(ids, skip_special_tokens=skip)


@given(data=st.data(), skip=st.booleans())
def test_byte_level_text_equals_the_tokenizers_library(
    smollm2: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    ids = data.draw(_token_ids(smollm2.vocab_size))
    assert smollm2.decode(ids, skip_special_tokens=skip) == smollm2._backend.decode(
        ids, skip_special_tokens=skip
    )


@given(text=st.text(max_size=60))
def test_any_text_survives_gemma_token_by_token(gemma3: Tokenizer, text: str) -> None:
    text = text.replace("▁", " ")  # which is how Gemma spells a space
    ids = gemma3.encode(text, add_special_tokens=False)
    assert _in_pieces(gemma3, ids, [1], skip=False) == text
    assert gemma3._backend.decode(ids, skip_special_tokens=False) == text


@given(data=st.data())
def test_nothing_let_out_is_ever_taken_back(packaged: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(_token_ids(packaged.vocab_size))
    detokenizer = IncrementalDetokenizer(packaged)
    text = ""
    for count, token_id in enumerate(ids, start=1):
        text += detokenizer.append([token_id])
        assert packaged.decode(ids[:count]).startswith(text)


def test_a_character_waits_for_its_last_byte(gemma3: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(gemma3)
    ids = [gemma3.token_to_id(f"<0x{byte:02X}>") for byte in "🦜".encode()]
    assert all(token_id is not None for token_id in ids)
    pieces = [detokenizer.append([token_id]) for token_id in ids if token_id is not None]
    assert pieces == ["", "", "", "🦜"]
    assert detokenizer.flush() == ""


def test_a_character_that_never_ends_comes_out_at_the_flush(gemma3: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(gemma3)
    first = gemma3.token_to_id("<0xF0>")
    assert first is not None
    assert detokenizer.append([first]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_only_the_text_as_a_whole_loses_its_first_space(llama_metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf_metadata(llama_metadata)
    ids = tokenizer.encode("ab ab", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.append([token_id]) for token_id in [1, *ids]] == ["", "ab", " ab"]
    assert build_gguf_tokenizer(llama_metadata).backend.decode(ids) == "ab ab"


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.Metaspace(),
        decoders.Metaspace(prepend_scheme="never"),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]),
    ],
)
@given(ids=st.lists(st.integers(0, 6), max_size=12))
def test_other_decoders_mean_what_the_library_says(decoder: Any, ids: list[int]) -> None:
    tokens = ["▁", "▁▁", "a", "▁b", "c▁", "<s>", " "]
    backend = tokenizers.Tokenizer(
        models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="a")
    )
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(["<s>"])
    tokenizer = Tokenizer(
        TokenizerParts(
            backend=backend,
            vocab_size=len(tokens),
            bos_token_id=None,
            eos_token_ids=(),
            special_ids=frozenset({5}),
            affixes=None,
            chat_template=None,
        )
    )
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == backend.decode(
            ids, skip_special_tokens=skip
        )
        assert _in_pieces(tokenizer, ids, [1], skip) == backend.decode(
            ids, skip_special_tokens=skip
        )


def test_the_byte_alphabet_is_a_bijection() -> None:
    assert sorted(BYTE_OF_CHAR.values()) == list(range(256))
    assert len(BYTE_OF_CHAR) == 256
    assert BYTE_OF_CHAR["Ġ"] == 0x20
    assert BYTE_OF_CHAR["Ċ"] == 0x0A
