"""Tokenizers from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, normalizers

from jaxinfer.config import require
from jaxinfer.text import byte_level, sentence_piece
from jaxinfer.text.control import ControlToken, ControlTokens, looks_like_control
from jaxinfer.text.hugging_face import LibraryEncoder
from jaxinfer.text.sentence_piece import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from jaxinfer.text.template import ChatTemplate
from jaxinfer.text.tokenizer import Tokenizer, Vocabulary

PREFIX = "tokenizer.ggml."
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Phi-3's control tokens take the white space behind them, for which GGUF has no field; not these.
UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that GGUF `metadata` (key to plain Python value) holds.

    Errors: ValueError for a kind of tokenizer, or a pre-tokenizer, that is not known.
    """
    kind = metadata.get(PREFIX + "model")
    builders = {"gpt2": _byte_level, "llama": _sentence_piece}
    if kind not in builders:
        raise ValueError(
            f"tokenizer.ggml.model={kind!r} is not supported. Known: {', '.join(builders)}."
        )
    source = metadata.get("tokenizer.chat_template")
    return builders[kind](metadata, ChatTemplate(source) if source else None)


def _byte_level(metadata: Mapping[str, Any], template: ChatTemplate | None) -> Tokenizer:
    """A byte-level BPE tokenizer."""
    name = metadata.get(PREFIX + "pre")
    rows = byte_level.PRE_TOKENIZERS
    if name not in rows:
        raise ValueError(
            f"tokenizer.ggml.pre={name!r} is not supported: its text would be cut wrongly. "
            f"Known: {', '.join(rows)}."
        )
    row = rows[name]
    tokens = metadata[PREFIX + "tokens"]
    kinds = _kinds(metadata)
    special = {i for i in range(len(tokens)) if _is_control(tokens[i], kinds[i])}
    added = special | {i for i in range(len(tokens)) if kinds[i] == USER_DEFINED}
    merges = [tuple(merge.split(" ")) for merge in metadata[PREFIX + "merges"]]
    library = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=row.ignore_merges,
        )
    )
    library.pre_tokenizer = row.build()
    if row.nfc:
        library.normalizer = normalizers.NFC()
    library.add_tokens(
        [AddedToken(tokens[i], special=i in special, normalized=False) for i in sorted(added)]
    )
    control = ControlTokens(ControlToken(id=i, text=tokens[i]) for i in sorted(special))
    bos_id = metadata.get(PREFIX + "bos_token_id")
    add_bos = metadata.get(PREFIX + "add_bos_token", row.bos)
    ends = _end_ids(metadata)
    vocabulary = Vocabulary(
        pieces=tuple(
            token.encode("utf-8") if i in added else byte_level.piece_bytes(token)
            for i, token in enumerate(tokens)
        ),
        control=control,
        hidden=frozenset(special),
        dropped_spaces=0,
        prefix_ids=(bos_id,) if add_bos and bos_id is not None else (),
        bos_id=bos_id,
        eos_id=ends[0] if ends else None,
        eos_ids=control.end_ids() | frozenset(ends),
    )
    return Tokenizer(LibraryEncoder(library), vocabulary, chat_template=template)


def _sentence_piece(metadata: Mapping[str, Any], template: ChatTemplate | None) -> Tokenizer:
    """A SentencePiece-like tokenizer: tokens with scores, bytes for what they cannot say."""
    tokens = metadata[PREFIX + "tokens"]
    kinds = _kinds(metadata)
    unknown_id = metadata.get(PREFIX + "unknown_token_id", 0)
    strips = metadata.get("general.architecture") == "phi3"
    control = [
        ControlToken(id=i, text=token, rstrip=strips and token not in UNSTRIPPED)
        for i, token in enumerate(tokens)
        if i != unknown_id and _is_control(token, kinds[i])
    ]
    model = sentence_piece.serialize(
        _scored_pieces(metadata, unknown_id, {token.id for token in control}),
        byte_fallback=BYTE in kinds,
        add_space_prefix=metadata.get(PREFIX + "add_space_prefix", True),
    )
    return sentence_piece.build(
        model,
        control=control,
        add_bos=metadata.get(PREFIX + "add_bos_token", True),
        bos_id=metadata.get(PREFIX + "bos_token_id", 1),
        eos_ids=_end_ids(metadata),
        space_after_control=True,
        chat_template=template,
    )


def _scored_pieces(
    metadata: Mapping[str, Any], unknown_id: int, control_ids: set[int]
) -> Iterator[tuple[str, float, int]]:
    """(text, score, type) of each token, with the one unknown piece that SentencePiece wants."""
    tokens, scores = metadata[PREFIX + "tokens"], metadata[PREFIX + "scores"]
    for i, (token, score, kind) in enumerate(zip(tokens, scores, _kinds(metadata), strict=True)):
        if i == unknown_id:
            kept = UNKNOWN
        elif i in control_ids:
            kept = CONTROL
        else:
            kept = UNUSED if kind == UNKNOWN else kind
        yield token, float(score), kept


def _kinds(metadata: Mapping[str, Any]) -> list[int]:
    """The type of each token; all are ordinary where the file does not say."""
    tokens = metadata[PREFIX + "tokens"]
    kinds = metadata.get(PREFIX + "token_type") or [NORMAL] * len(tokens)
    require(
        len(kinds) == len(tokens),
        f"tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens. "
        "Convert the model to GGUF again.",
    )
    return kinds


def _is_control(token: str, kind: int) -> bool:
    return kind == CONTROL or (kind == USER_DEFINED and looks_like_control(token))


def _end_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that the file itself says end a text or a turn, its EOS first."""
    named = (metadata.get(PREFIX + key) for key in END_KEYS)
    return tuple(i for i in named if i is not None)
