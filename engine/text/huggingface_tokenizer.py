"""A tokenizer from a Hugging Face directory: tokenizer.json and the small files beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from octavo.engine.errors import ModelLoadError, UnsupportedModelError, shorten
from octavo.engine.text.tokenizer_parts import (
    TokenizerParts,
    refusing_what_fails,
    special_token_ids,
    vocabulary_size,
    with_end_of_turn,
)
from octavo.models.checks import MAX_EOS_TOKENS, MAX_SIZE, is_integer
from octavo.models.loading.json_file import check_file_size, read_json, read_text

MAX_TOKENIZER_BYTES = 1 << 27
"""Largest file of a vocabulary: several times the largest that exist."""
MAX_TEMPLATE_BYTES = 1 << 20

_VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
)
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory holds a tokenizer's files."""
    return any((directory / name).is_file() for name in _VOCABULARY_FILES)


def load_huggingface_tokenizer(directory: Path) -> TokenizerParts:
    """The tokenizer of a model directory.

    tokenizer.json is the tokenizer, and its post-processor alone decides whether BOS and EOS are
    added; tokenizer_config.json and special_tokens_map.json name the special tokens;
    chat_template.jinja (else the configuration, else chat_template.json) holds the template;
    generation_config.json (else config.json) the ids that end a generation. Without a
    tokenizer.json, `transformers` converts what is there; code that comes with a model is never
    run, and nothing is downloaded.

    Raises:
        ModelLoadError: a file is damaged, or the directory has no tokenizer.
        UnsupportedModelError: a tokenizer that exists only as Python code.
    """
    for name in _VOCABULARY_FILES:
        if (directory / name).is_file():
            check_file_size(directory / name, MAX_TOKENIZER_BYTES)
    with refusing_what_fails(f"{directory} holds no sound tokenizer"):
        return _load(directory)


def _load(directory: Path) -> TokenizerParts:
    config = _read_json(directory / "tokenizer_config.json")
    if (directory / "tokenizer.json").is_file():
        backend = _read_backend(directory / "tokenizer.json")
    else:
        backend = _convert(directory)
    backend.no_truncation()
    backend.no_padding()
    named = _named_tokens(config, _read_json(directory / "special_tokens_map.json"))
    _add_missing_tokens(backend, config, named)
    special_ids = special_token_ids(backend)
    bos, eos = (
        backend.token_to_id(named[name]) if name in named else None
        for name in ("bos_token", "eos_token")
    )
    stated = [] if eos is None else [eos]
    stated += _generation_eos_ids(directory)
    return TokenizerParts(
        backend=backend,
        vocab_size=vocabulary_size(backend),
        bos_token_id=bos,
        eos_token_ids=with_end_of_turn(backend, stated, special_ids),
        special_ids=special_ids,
        affixes=None,
        chat_template=_chat_template(directory, config),
        named_tokens=named,
        model_type=_model_type(directory),
    )


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    with refusing_what_fails(f"{path} is not a sound tokenizer"):
        return tokenizers.Tokenizer.from_file(str(path))


def _convert(directory: Path) -> tokenizers.Tokenizer:
    from transformers import AutoTokenizer  # seconds to import, rarely needed

    with refusing_what_fails(f"{directory} holds no tokenizer that loads"):
        converted = AutoTokenizer.from_pretrained(
            str(directory), trust_remote_code=False, local_files_only=True
        )
    backend = getattr(converted, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise UnsupportedModelError(f"{directory} has no tokenizer.json and none can be made")
    return backend


def _named_tokens(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> dict[str, str]:
    named = {}
    for name in _NAMED:
        value = config.get(name, special_map.get(name))
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str) and value:
            named[name] = value
    return named


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]
) -> None:
    """Add what only the configuration knows of, and see that its ids come out as it says."""
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict):
        raise ModelLoadError("tokenizer_config.json: added_tokens_decoder is not an object")
    try:
        stated = sorted((int(token_id), dict(token)) for token_id, token in listed.items())
    except (TypeError, ValueError) as error:
        raise ModelLoadError(f"tokenizer_config.json: added_tokens_decoder: {error}") from error
    missing = []  # added all at once: each call builds the search for all of them again
    for token_id, token in stated:
        content = token.get("content")
        if not isinstance(content, str) or not content:
            raise ModelLoadError(f"tokenizer_config.json: added token {token_id} has no content")
        if backend.token_to_id(content) is None:
            flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
            given = {flag: bool(token[flag]) for flag in flags if flag in token}
            missing.append(AddedToken(content, **given))
    backend.add_tokens(missing)
    for token_id, token in stated:
        if backend.token_to_id(token["content"]) != token_id:
            raise ModelLoadError(
                f"tokenizer_config.json gives {shorten(token['content'])} the id {token_id}, "
                f"tokenizer.json {backend.token_to_id(token['content'])}"
            )
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    in_vocabulary = [
        token
        for token in named.values()
        if token not in known and backend.token_to_id(token) is not None
    ]
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in in_vocabulary]
    )


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return read_text(path, MAX_TEMPLATE_BYTES)
    template = config.get("chat_template")
    if template is None:  # where processors of images kept it
        template = _read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several, each with a name
        named = [item for item in template if isinstance(item, dict)]
        template = next((i.get("template") for i in named if i.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _model_type(directory: Path) -> str:
    named = _read_json(directory / "config.json").get("model_type")
    return named if isinstance(named, str) else ""


def _generation_eos_ids(directory: Path) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        value = _read_json(directory / name).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if len(ids) > MAX_EOS_TOKENS or not all(is_integer(each, 0, MAX_SIZE) for each in ids):
            raise ModelLoadError(
                f"{directory / name}: eos_token_id = {shorten(value)} is not allowed: "
                f"a token id, or at most {MAX_EOS_TOKENS} of them"
            )
        return ids
    return []
