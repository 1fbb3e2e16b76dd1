"""How text is cut into words before byte-level BPE, by the name a GGUF file gives it.

A GGUF file holds the vocabulary and the merges but only a name for this step. A wrong cut gives
plausible, wrong tokens, so a name not listed here is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from octavo.engine.errors import UnsupportedModelError, shorten

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_SYMBOLS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}{_SYMBOLS}{_TAIL}"
_QWEN2 = rf"{_WORDS}|\p{{N}}{_SYMBOLS}{_TAIL}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_TAIL}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteLevelKind:
    """One way to prepare text for byte-level BPE.

    Attributes:
        split: the regular expression of a word; None is GPT-2's, which `tokenizers` builds in.
        single_digits: cut out each digit alone before anything else.
        nfc: normalize to Unicode NFC first.
        ignore_merges: a word that is itself in the vocabulary is one token, whatever the merges.
        add_bos: whether a text begins with the BOS token where the file does not say.
    """

    split: str | None = None
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.split is not None:
            steps.append(pre_tokenizers.Split(Regex(self.split), behavior="isolated"))
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.split is None)
        return pre_tokenizers.Sequence([*steps, byte_level])


_GPT2_KIND = ByteLevelKind()
_DIGITS_KIND = ByteLevelKind(single_digits=True)
_LLAMA3_KIND = ByteLevelKind(split=_LLAMA3, ignore_merges=True, add_bos=True)
_QWEN2_KIND = ByteLevelKind(split=_QWEN2, nfc=True)
_TEKKEN_KIND = ByteLevelKind(split=_TEKKEN, ignore_merges=True, add_bos=True)

BYTE_LEVEL_KINDS: dict[str, ByteLevelKind] = {
    **dict.fromkeys(("default", "gpt-2", "mpt", "olmo", "phi-2"), _GPT2_KIND),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), _DIGITS_KIND),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3_KIND),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2_KIND),
    "tekken": _TEKKEN_KIND,
}
"""`tokenizer.ggml.pre` -> what it means."""


def byte_level_kind(name: str) -> ByteLevelKind:
    """The kind a file names.

    Raises:
        UnsupportedModelError: the name is not one of `BYTE_LEVEL_KINDS`.
    """
    try:
        return BYTE_LEVEL_KINDS[name]
    except KeyError:
        raise UnsupportedModelError(
            f"tokenizer.ggml.pre = {shorten(name)} is not allowed: {', '.join(BYTE_LEVEL_KINDS)}"
        ) from None
