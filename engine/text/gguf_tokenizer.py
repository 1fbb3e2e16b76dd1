"""A tokenizer from the `tokenizer.*` metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from octavo.engine.errors import ModelLoadError, UnsupportedModelError, shorten
from octavo.engine.text.pre_tokenizers import byte_level_kind
from octavo.engine.text.tokenizer_parts import (
    TokenizerParts,
    refusing_what_fails,
    special_token_ids,
    with_end_of_turn,
)

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE = "▁"  # how SentencePiece spells a space
MAX_MERGE_CHARS = 1 << 27
"""Most characters that may be cut and compared to find merges: eight times what Gemma's take."""


def build_gguf_tokenizer(metadata: Mapping[str, Any]) -> TokenizerParts:
    """The tokenizer that a GGUF file's metadata describes.

    Args:
        metadata: key -> value, as `GGUFFile.metadata` holds it.

    Raises:
        ModelLoadError: entries are missing, or contradict each other.
        UnsupportedModelError: a kind of tokenizer that is not byte-level or SentencePiece BPE.
    """
    fields = _Fields(metadata)
    model = fields.text("model")
    with refusing_what_fails("the tokenizer.ggml entries contradict each other"):
        if model == "gpt2":
            backend, add_bos = _byte_level(fields)
        elif model == "llama":
            backend, add_bos = _sentencepiece(fields)
        else:
            raise UnsupportedModelError(
                f"tokenizer.ggml.model = {shorten(model)} is not allowed: gpt2 or llama"
            )
        _mark_added_tokens(backend, fields)
        return _parts(backend, fields, add_bos, metadata.get("general.architecture"))


class _Fields:
    """The `tokenizer.ggml` entries, each checked when it is read."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        self.tokens: list[str] = self._list("tokens", str)
        if not self.tokens:
            raise ModelLoadError("tokenizer.ggml.tokens is missing or empty")
        self.token_types: list[int] = self._list("token_type", int, len(self.tokens))
        self.scores: list[float] = self._list("scores", float, len(self.tokens))
        self.architecture = str(metadata.get("general.architecture", ""))

    def get(self, key: str) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}")

    def text(self, key: str, default: str | None = None) -> str:
        value = self.metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, str):
            raise ModelLoadError(
                f"tokenizer.ggml.{key} = {shorten(value)} is not allowed: a string"
            )
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, bool):
            raise ModelLoadError(f"tokenizer.ggml.{key} = {shorten(value)} is not allowed: a bool")
        return value

    def token_id(self, name: str) -> int | None:
        key, value = f"{name}_token_id", self.get(f"{name}_token_id")
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < len(self.tokens):
            raise ModelLoadError(
                f"tokenizer.ggml.{key} = {shorten(value)} is not allowed: "
                f"0 to {len(self.tokens) - 1}"
            )
        return value

    def merges(self) -> list[tuple[str, str]] | None:
        if self.get("merges") is None:
            return None
        pairs = []
        for merge in self._list("merges", str):
            left, _, right = merge.partition(" ")
            if not left or not right or " " in right:
                raise ModelLoadError(
                    f"tokenizer.ggml.merges holds {shorten(merge)}: not two tokens"
                )
            pairs.append((left, right))
        return pairs

    def _list(self, key: str, kind: type, length: int | None = None) -> list[Any]:
        value = self.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise ModelLoadError(f"tokenizer.ggml.{key} is not a list of {kind.__name__}")
        if length is not None and len(value) != length:
            raise ModelLoadError(
                f"tokenizer.ggml.{key} has {len(value)} entries for {length} tokens"
            )
        return value


def _byte_level(fields: _Fields) -> tuple[tokenizers.Tokenizer, bool]:
    kind = byte_level_kind(fields.text("pre", "default"))
    merges = fields.merges()
    if merges is None:
        raise ModelLoadError("tokenizer.ggml.merges is missing")
    vocab = {token: index for index, token in enumerate(fields.tokens)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, ignore_merges=kind.ignore_merges)
    )
    normalizer = kind.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = kind.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend, kind.add_bos


def _sentencepiece(fields: _Fields) -> tuple[tokenizers.Tokenizer, bool]:
    # The file spells a token of nothing but spaces with spaces; in the vocabulary it is "▁▁".
    tokens = [token if token.strip(" ") else _SPACE * len(token) for token in fields.tokens]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = fields.merges()
    if merges is None:
        merges = _merges_of_vocabulary(fields, tokens, vocab)
    unknown = fields.token_id("unknown")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix_space = fields.flag("add_space_prefix", True)
    replace = normalizers.Replace(" ", _SPACE)
    decoding: list[decoders.Decoder] = [
        decoders.Replace(_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if prefix_space:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace])
        decoding.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = replace
    backend.decoder = decoders.Sequence(decoding)
    return backend, True


def _merges_of_vocabulary(
    fields: _Fields, tokens: Sequence[str], vocab: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Every way to put a token together from two others, the best token first.

    SentencePiece merges the neighbours whose union has the highest score, which is BPE with these
    merges. Gemma's tokens stand in that order already (its runs of spaces have no true score).
    """
    order: Sequence[int] = range(len(tokens))
    if not fields.architecture.startswith("gemma"):
        if not fields.scores:
            raise ModelLoadError("tokenizer.ggml.scores is missing, and there are no merges")
        order = sorted(order, key=lambda index: -fields.scores[index])
    num_chars = sum(len(token) ** 2 for token in tokens)
    if num_chars > MAX_MERGE_CHARS:
        raise ModelLoadError(
            f"tokenizer.ggml.tokens are too long to find their merges: the squares of their "
            f"lengths add up to {num_chars}, at most {MAX_MERGE_CHARS} are allowed"
        )
    merges = []
    for index in order:
        token = tokens[index]
        for cut in range(len(token) - 1, 0, -1):
            left = token[:cut]
            if left in vocab and token[cut:] in vocab:
                merges.append((left, token[cut:]))
    return merges


def _mark_added_tokens(backend: tokenizers.Tokenizer, fields: _Fields) -> None:
    """Control tokens become special; user-defined ones are found whole in the text."""
    types = fields.token_types
    if not types:
        named = (fields.token_id(name) for name in ("bos", "eos", "unknown"))
        special = [fields.tokens[index] for index in named if index is not None]
        plain: list[str] = []
    else:
        pairs = list(zip(fields.tokens, types, strict=True))
        special = [token for token, kind in pairs if kind in (_UNKNOWN, _CONTROL) and token]
        plain = [
            token
            for token, kind in pairs
            if kind == _USER_DEFINED and token and backend.token_to_id(token) is not None
        ]
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, normalized=False) for token in plain])


def _parts(
    backend: tokenizers.Tokenizer, fields: _Fields, add_bos: bool, architecture: object
) -> TokenizerParts:
    named = {name: fields.token_id(name) for name in ("bos", "eos", "unknown", "padding")}
    bos, eos = named["bos"], named["eos"]
    prefix = (bos,) if fields.flag("add_bos_token", add_bos) and bos is not None else ()
    suffix = (eos,) if fields.flag("add_eos_token", False) and eos is not None else ()
    special_ids = special_token_ids(backend)
    stated = [fields.token_id(name) for name in ("eos", "eot", "eom")]
    template = fields.metadata.get("tokenizer.chat_template")
    short = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    return TokenizerParts(
        backend=backend,
        vocab_size=len(fields.tokens),
        bos_token_id=bos,
        eos_token_ids=with_end_of_turn(
            backend, [token_id for token_id in stated if token_id is not None], special_ids
        ),
        special_ids=special_ids,
        affixes=(prefix, suffix),
        chat_template=template if isinstance(template, str) else None,
        named_tokens={
            short[name]: fields.tokens[index] for name, index in named.items() if index is not None
        },
        model_type=architecture if isinstance(architecture, str) else "",
    )
