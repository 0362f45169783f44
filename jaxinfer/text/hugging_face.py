"""Tokenizers from a Hugging Face `tokenizer.json`, through the `tokenizers` library."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any, final

import tokenizers

from jaxinfer.config import require
from jaxinfer.text import byte_level
from jaxinfer.text.control import ControlToken, ControlTokens, looks_like_control
from jaxinfer.text.template import ChatTemplate
from jaxinfer.text.tokenizer import Place, Tokenizer, Vocabulary

SPACE_SYMBOL = "▁"
SPACED_DECODERS = frozenset(("Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"))


@final
class LibraryEncoder:
    """Encodes with `tokenizers`; `later` serves text that follows a control token."""

    def __init__(self, library: tokenizers.Tokenizer, later: tokenizers.Tokenizer | None = None):
        self._first = library
        self._later = later or library
        for each in (self._first, self._later):
            each.encode_special_tokens = True  # as ordinary text, that is

    def encode(self, text: str, place: Place) -> list[int]:
        """The ids of `text`, without special tokens."""
        library = self._first if place == "start" else self._later
        return library.encode(text, add_special_tokens=False).ids


def tokenizer_from_json(
    text: str, config: Mapping[str, Any], *, chat_template: ChatTemplate | None = None
) -> Tokenizer:
    """The tokenizer that the content of a `tokenizer.json` describes.

    `config` is its `tokenizer_config.json` (over `special_tokens_map.json`): `bos_token`,
    `eos_token`, `add_bos_token`. Errors: ValueError for a decoder that is neither byte-level nor
    SentencePiece-like.
    """
    spec = json.loads(text)
    added = spec.get("added_tokens") or []
    for token in added:
        token["special"] = token["special"] or looks_like_control(token["content"])
    library = tokenizers.Tokenizer.from_str(json.dumps(spec))
    later = _without_first_space(spec)
    encoder = LibraryEncoder(
        library, tokenizers.Tokenizer.from_str(json.dumps(later)) if later else None
    )

    unknown = _unknown_text(spec["model"])
    control = ControlTokens(
        ControlToken(
            id=token["id"],
            text=token["content"],
            lstrip=token.get("lstrip", False),
            rstrip=token.get("rstrip", False),
            single_word=token.get("single_word", False),
        )
        for token in added
        if token["special"] and token["content"] != unknown
    )
    decoders = _decoders(spec)
    bos_id = _id_of(library, config.get("bos_token"))
    eos_id = _id_of(library, config.get("eos_token"))
    vocabulary = Vocabulary(
        pieces=_pieces(library.get_vocab(with_added_tokens=True), added, decoders),
        control=control,
        hidden=frozenset(token["id"] for token in added if token["special"]),
        dropped_spaces=_dropped_spaces(decoders),
        prefix_ids=_prefix_ids(library, config.get("add_bos_token"), bos_id),
        bos_id=bos_id,
        eos_id=eos_id,
        eos_ids=control.end_ids() | ({eos_id} if eos_id is not None else frozenset()),
    )
    return Tokenizer(encoder, vocabulary, chat_template=chat_template)


def token_text(token: str | Mapping[str, Any] | None) -> str | None:
    """The text of a token that is written as a string, or as a mapping with `content`."""
    return token["content"] if isinstance(token, Mapping) else token


def _id_of(library: tokenizers.Tokenizer, token: str | Mapping[str, Any] | None) -> int | None:
    text = token_text(token)
    return None if text is None else library.token_to_id(text)


def _unknown_text(model: Mapping[str, Any]) -> str | None:
    """The text of the token that stands for what the vocabulary cannot say, if there is one."""
    unknown_id = model.get("unk_id")
    return model.get("unk_token") if unknown_id is None else model["vocab"][unknown_id][0]


def _prefix_ids(
    library: tokenizers.Tokenizer, add_bos: bool | None, bos_id: int | None
) -> tuple[int, ...]:
    """What goes before a text, by the configuration or else by the file's post-processor."""
    if add_bos is not None:
        return (bos_id,) if add_bos and bos_id is not None else ()
    plain = library.encode("a", add_special_tokens=False).ids
    full = library.encode("a", add_special_tokens=True).ids
    start = next(n for n in range(len(full)) if full[n : n + len(plain)] == plain)
    return tuple(full[:start])


def _decoders(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The steps of the file's decoder, all of them known."""
    steps = _steps(spec.get("decoder"), "decoders")
    types = {step["type"] for step in steps}
    require(
        "ByteLevel" in types or (len(steps) > 0 and types <= SPACED_DECODERS),
        f"tokenizer.json has the decoder {sorted(types)}. Supported: ByteLevel, or steps of "
        f"{', '.join(sorted(SPACED_DECODERS))}.",
    )
    return steps


def _dropped_spaces(decoders: Sequence[Mapping[str, Any]]) -> int:
    """Most spaces that decoding drops from the start of a text."""
    strip = sum(step["start"] for step in decoders if step["type"] == "Strip")
    spaced = any(
        step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never"
        for step in decoders
    )
    return strip + spaced


def _pieces(
    ids: Mapping[str, int],
    added: Sequence[Mapping[str, Any]],
    decoders: Sequence[Mapping[str, Any]],
) -> tuple[bytes, ...]:
    """The bytes of every id; an added token stands for its own text."""
    types = {step["type"] for step in decoders}
    literal = {token["content"] for token in added}
    pieces = [b""] * (max(ids.values(), default=-1) + 1)
    for token, token_id in ids.items():
        if token in literal:
            pieces[token_id] = token.encode("utf-8")
        elif "ByteLevel" in types:
            pieces[token_id] = byte_level.piece_bytes(token)
        else:
            pieces[token_id] = spaced_bytes(token, byte_fallback="ByteFallback" in types)
    return tuple(pieces)


def spaced_bytes(token: str, *, byte_fallback: bool) -> bytes:
    """The bytes of a SentencePiece token: U+2581 is a space, `<0xE2>` (with fallback) a byte."""
    if byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace(SPACE_SYMBOL, " ").encode("utf-8")


def _without_first_space(spec: Mapping[str, Any]) -> dict[str, Any] | None:
    """The file for text behind a control token, where only the first text gets a space."""
    later = {**spec, "pre_tokenizer": copy.deepcopy(spec.get("pre_tokenizer"))}
    steps = _steps(later["pre_tokenizer"], "pretokenizers")
    changed = [s for s in steps if s["type"] == "Metaspace" and s.get("prepend_scheme") == "first"]
    for step in changed:
        step["prepend_scheme"] = "never"
    return later if changed else None


def _steps(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """The steps of one part of the file: those of a sequence, or itself alone."""
    if part is None:
        return []
    return part[key] if part["type"] == "Sequence" else [part]
