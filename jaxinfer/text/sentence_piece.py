"""Tokenizers from a SentencePiece `tokenizer.model`, through the `sentencepiece` library."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import sentencepiece

from jaxinfer.text.control import ControlToken, ControlTokens, looks_like_control
from jaxinfer.text.hugging_face import SPACE_SYMBOL, spaced_bytes, token_text
from jaxinfer.text.template import ChatTemplate
from jaxinfer.text.tokenizer import ALL_SPACES, Place, Tokenizer, Vocabulary

# Types of a piece, as SentencePiece and GGUF number them.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


@final
class SentencePieceEncoder:
    """Encodes with `sentencepiece`.

    The library puts a space before a text if the model says so. Text behind a control token gets
    one only if `space_after_control`, and none where it starts with a space already.
    """

    def __init__(self, model: bytes, *, space_after_control: bool):
        self._spaced = _processor(model)
        # Messages of one field that follow each other are merged: this only turns one setting off.
        self._unspaced = _processor(model + _field(3, _field(3, 0)))
        self._space_after_control = space_after_control

    def encode(self, text: str, place: Place) -> list[int]:
        """The ids of `text`."""
        after_control = place == "after control" and not text.startswith(" ")
        spaced = place == "start" or (after_control and self._space_after_control)
        return (self._spaced if spaced else self._unspaced).encode(text)


def tokenizer_from_sentencepiece(
    model: bytes, config: Mapping[str, Any], *, chat_template: ChatTemplate | None = None
) -> Tokenizer:
    """The tokenizer of a `tokenizer.model` file's bytes.

    `config` is its `tokenizer_config.json`: `add_bos_token` (on by default), `eos_token`, `legacy`
    (a space goes before text behind a control token; on by default) and `added_tokens_decoder`,
    whose special tokens and tokens beyond the model are control tokens.
    """
    library = _processor(model)
    size = library.vocab_size()
    added = {int(key): token for key, token in config.get("added_tokens_decoder", {}).items()}
    control = [
        ControlToken(
            id=i,
            text=token["content"],
            lstrip=token.get("lstrip", False),
            rstrip=token.get("rstrip", False),
        )
        for i, token in added.items()
        if (token.get("special") or i >= size) and i != library.unk_id()
    ]
    named = {token.id for token in control}
    control += [
        ControlToken(id=i, text=text)
        for i in range(size)
        if i not in named
        and (text := library.id_to_piece(i))
        and (library.is_control(i) or looks_like_control(text))
    ]
    ids = {token.text: token.id for token in control}
    eos_id = ids.get(token_text(config.get("eos_token")) or "", library.eos_id())
    bos_id = ids.get(token_text(config.get("bos_token")) or "", library.bos_id())
    extra = [token_text(added.get(i)) or "" for i in range(size, max(added, default=-1) + 1)]
    shown = {i for i, token in added.items() if i >= size and not token.get("special")}
    return build(
        model,
        library=library,
        extra=extra,
        control=control,
        shown=shown,
        add_bos=config.get("add_bos_token", True),
        bos_id=bos_id if bos_id >= 0 else None,
        eos_ids=(eos_id,) if eos_id >= 0 else (),
        space_after_control=config.get("legacy", True),
        chat_template=chat_template,
    )


def build(
    model: bytes,
    *,
    library: sentencepiece.SentencePieceProcessor | None = None,
    extra: Sequence[str] = (),
    control: Iterable[ControlToken],
    shown: Iterable[int] = (),
    add_bos: bool,
    bos_id: int | None,
    eos_ids: Sequence[int],
    space_after_control: bool,
    chat_template: ChatTemplate | None,
) -> Tokenizer:
    """The tokenizer of a serialised model.

    `extra` are the texts of ids beyond it, `shown` control tokens that decoding shows, and the
    first of `eos_ids` is the file's own.
    """
    library = library or _processor(model)
    tokens = ControlTokens(control)
    texts = {token.id: token.text.encode("utf-8") for token in tokens.tokens}
    pieces = [texts.get(i) or _piece(library, i) for i in range(library.vocab_size())]
    vocabulary = Vocabulary(
        pieces=(*pieces, *(text.encode("utf-8") for text in extra)),
        control=tokens,
        hidden=tokens.ids - frozenset(shown),
        dropped_spaces=_dropped_spaces(library),
        prefix_ids=(bos_id,) if add_bos and bos_id is not None else (),
        bos_id=bos_id,
        eos_id=eos_ids[0] if eos_ids else None,
        eos_ids=tokens.end_ids() | frozenset(eos_ids),
    )
    encoder = SentencePieceEncoder(model, space_after_control=space_after_control)
    return Tokenizer(encoder, vocabulary, chat_template=chat_template)


def serialize(
    pieces: Iterable[tuple[str, float, int]], *, byte_fallback: bool, add_space_prefix: bool
) -> bytes:
    """A BPE model of (text, score, type) `pieces`, as a SentencePiece file would hold it.

    Written in the protocol-buffer wire format: field numbers as in `sentencepiece_model.proto`.
    """
    parts = [
        _field(1, _field(1, text.encode("utf-8")) + _field(2, score) + _field(3, kind))
        for text, score, kind in pieces
    ]
    bpe = 2
    trainer = _field(3, bpe) + _field(35, int(byte_fallback))
    normalizer = _field(1, b"identity") + _field(3, int(add_space_prefix)) + _field(4, 0)
    return b"".join(parts) + _field(2, trainer) + _field(3, normalizer)


def _processor(model: bytes) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=model)


def _piece(library: sentencepiece.SentencePieceProcessor, token_id: int) -> bytes:
    if library.is_unknown(token_id):
        return library.decode([token_id]).encode("utf-8")
    return spaced_bytes(library.id_to_piece(token_id), byte_fallback=library.is_byte(token_id))


def _dropped_spaces(library: sentencepiece.SentencePieceProcessor) -> int:
    """Most spaces that the library drops from the start of a text, by trying."""
    space = library.piece_to_id(SPACE_SYMBOL)
    if library.is_unknown(space):
        return 1
    return {"": ALL_SPACES, " ": 1, "  ": 0}[library.decode([space, space])]


def _field(number: int, value: bytes | int | float) -> bytes:
    """One field of a protocol-buffer message: bytes, an integer or a 32-bit float."""
    if isinstance(value, bytes):
        return _varint(number << 3 | 2) + _varint(len(value)) + value
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 5) + struct.pack("<f", value)


def _varint(value: int) -> bytes:
    """`value` in groups of seven bits, lowest first."""
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)
