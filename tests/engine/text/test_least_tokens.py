"""A text's length bounds its tokens from below, whatever the text and the tokenizer."""

from __future__ import annotations

import unicodedata

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from octavo.engine.text.least_tokens import NORMAL_FORM_SHRINKS, token_sizes
from octavo.engine.text.tokenizer import Tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TEXTS = st.one_of(
    st.text(max_size=200),
    st.text(" \n\t\x00\x06aé", max_size=200),
    st.text("e\u0301\u212bK\u1100\u1161\u11a8\U0001d4e9\u0390", max_size=200),
    st.builds(lambda part, count: part * count, st.text(max_size=6), st.integers(0, 60)),
)


def byte_level(
    missing: str = "", normalizer: normalizers.Normalizer | None = None
) -> tokenizers.Tokenizer:
    tokens = [*(char for char in ALPHABET if char not in missing), "ab", "ĠĠ", "ĠĠĠĠ", "Ã©"]
    merges = [("a", "b"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("Ã", "©")]
    merges = [pair for pair in merges if not set(missing) & set("".join(pair))]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges)
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_special_tokens([AddedToken("<|end|>", normalized=False)])
    return backend


def sentencepiece(replaced: str = "▁", *, bytes_known: int = 256) -> tokenizers.Tokenizer:
    tokens = ["<unk>", *BYTES[:bytes_known], "▁", "a", "▁a", "▁▁", "aa"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={t: i for i, t in enumerate(tokens)},
            merges=[("▁", "a"), ("▁", "▁"), ("a", "a")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", replaced)]
    backend.normalizer = normalizers.Sequence(steps)
    return backend


BOUNDED = {
    "bytes": byte_level(),
    "bytes without some": byte_level(missing="ĀĆÃ"),
    "NFC": byte_level(normalizer=normalizers.NFC()),
    "NFKC": byte_level(normalizer=normalizers.NFKC()),
    "NFKC without control characters": byte_level("ĀĆ", normalizers.NFKC()),
    "byte fallback": sentencepiece(),
}


@pytest.mark.parametrize("kind", BOUNDED)
@given(text=TEXTS)
def test_no_text_has_fewer_tokens_than_its_length_says(kind: str, text: str) -> None:
    sizes = token_sizes(BOUNDED[kind])
    assert sizes is not None
    ids = BOUNDED[kind].encode(text, add_special_tokens=False).ids
    assert sizes.least_tokens(text) <= len(ids)


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
def test_normal_forms_shrink_no_text_further(form: str) -> None:
    """Any text that has this form is made of letters whose parts were, each, one of these."""
    letters = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    apart = "NFD" if form in ("NFC", "NFD") else "NFKD"
    parts = {letter: unicodedata.normalize(apart, letter) for letter in letters}
    longest: dict[str, int] = {}
    for letter, part in parts.items():
        if len(part) == 1:
            longest[part] = max(longest.get(part, 0), len(letter.encode()))
    for letter, part in parts.items():
        assert len(letter.encode()) <= sum(longest[one] for one in part)
        if unicodedata.normalize(form, letter) == letter:
            before = sum(longest[one] for one in part)
            assert before <= NORMAL_FORM_SHRINKS * len(letter.encode())


def with_added(**flags: bool) -> tokenizers.Tokenizer:
    backend = byte_level()
    backend.add_tokens([AddedToken("<x>", **flags)])
    return backend


def cutting(pre_tokenizer: pre_tokenizers.PreTokenizer) -> tokenizers.Tokenizer:
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizer, backend.pre_tokenizer])
    return backend


UNBOUNDED = {
    "collapses spaces": byte_level(normalizer=normalizers.Replace(Regex(" +"), " ")),
    "shortens": sentencepiece(replaced=""),
    "strips": byte_level(normalizer=normalizers.Strip()),
    "drops spaces": cutting(pre_tokenizers.WhitespaceSplit()),
    "removes what it splits at": cutting(pre_tokenizers.Split(" ", "removed")),
    "joins the unknown": sentencepiece(bytes_known=200),
    "token takes spaces in": with_added(lstrip=True),
    "drops letters that a normal form makes": byte_level("Ã", normalizers.NFC()),
    "words": tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")),
}


@pytest.mark.parametrize("kind", UNBOUNDED)
def test_a_tokenizer_that_loses_text_sets_no_bound(kind: str) -> None:
    assert token_sizes(UNBOUNDED[kind]) is None


def test_the_packaged_models_set_one(packaged: Tokenizer) -> None:
    sizes = packaged.token_sizes
    assert sizes is not None
    assert packaged.least_tokens("word " * 10_000) > 100
    assert packaged.least_tokens("\x06" * 10_000) <= len(packaged.encode("\x06" * 10_000))
