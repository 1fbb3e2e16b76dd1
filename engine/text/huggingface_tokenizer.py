"""A tokenizer from a Hugging Face directory: tokenizer.json and the small files beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from octavo.engine.errors import NOT_FAILURES, ModelLoadError, UnsupportedModelError
from octavo.engine.text.tokenizer_parts import (
    TokenizerParts,
    special_token_ids,
    with_end_of_turn,
)

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


def load_huggingface_tokenizer(directory: Path) -> TokenizerParts:
    """The tokenizer of a model directory.

    tokenizer.json is the tokenizer, and its post-processor alone decides whether BOS and EOS are
    added; tokenizer_config.json and special_tokens_map.json name the special tokens;
    chat_template.jinja (else the configuration) holds the template; generation_config.json (else
    config.json) the ids that end a generation. Without a tokenizer.json, `transformers` converts
    what is there; code that comes with a model is never run, and nothing is downloaded.

    Raises:
        ModelLoadError: a file is damaged, or the directory has no tokenizer.
        UnsupportedModelError: a tokenizer that exists only as Python code.
    """
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
        vocab_size=max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        bos_token_id=bos,
        eos_token_ids=with_end_of_turn(backend, stated, special_ids),
        special_ids=special_ids,
        affixes=None,
        chat_template=_chat_template(directory, config),
        named_tokens=named,
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} does not hold a JSON object")
    return content


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except NOT_FAILURES:
        raise
    except BaseException as error:  # tokenizers raises bare Exception, and its Rust code panics
        raise ModelLoadError(f"{path} is not a sound tokenizer: {error}") from error


def _convert(directory: Path) -> tokenizers.Tokenizer:
    from transformers import AutoTokenizer  # seconds to import, rarely needed

    try:
        converted = AutoTokenizer.from_pretrained(
            str(directory), trust_remote_code=False, local_files_only=True
        )
    except NOT_FAILURES:
        raise
    except BaseException as error:  # it raises many kinds, some from optional packages
        raise ModelLoadError(f"{directory} holds no tokenizer that loads: {error}") from error
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
    for token_id, token in stated:
        content = token.get("content")
        if not isinstance(content, str) or not content:
            raise ModelLoadError(f"tokenizer_config.json: added token {token_id} has no content")
        if backend.token_to_id(content) is None:
            flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
            given = {flag: bool(token[flag]) for flag in flags if flag in token}
            backend.add_tokens([AddedToken(content, **given)])
        if backend.token_to_id(content) != token_id:
            raise ModelLoadError(
                f"tokenizer_config.json gives {content!r} the id {token_id}, "
                f"tokenizer.json {backend.token_to_id(content)}"
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
        try:
            return path.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{path} cannot be read: {error}") from error
    template = config.get("chat_template")
    if isinstance(template, list):  # several, each with a name
        named = [item for item in template if isinstance(item, dict)]
        template = next((i.get("template") for i in named if i.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _generation_eos_ids(directory: Path) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        value = _read_json(directory / name).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
            raise ModelLoadError(
                f"{directory / name}: eos_token_id = {value!r} is not allowed: token ids"
            )
        return ids
    return []
