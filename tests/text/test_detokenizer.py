"""Streamed text: the joined deltas are the decoded text for every sequence of ids."""

import random

import pytest

from jaxinfer.text import IncrementalDetokenizer


def _deltas(tokenizer, ids, **options):
    stream = IncrementalDetokenizer(tokenizer, **options)
    return [*map(stream.add, ids), stream.finish()]


def _byte_ids(tokenizer):
    """Id of each single byte."""
    pieces = tokenizer.vocabulary.pieces
    return {piece: i for i, piece in enumerate(pieces) if len(piece) == 1}


def test_characters_whose_bytes_span_tokens(every_kind):
    tokenizer = every_kind["gguf, byte level"]
    ids = [_byte_ids(tokenizer)[bytes([b])] for b in "a🔥b".encode()]
    assert len(ids) == 6
    assert _deltas(tokenizer, ids) == ["a", "", "", "", "🔥", "b", ""]
    assert "".join(tokenizer.decode([i]) for i in ids).count("\ufffd") == 4


def test_a_lone_lead_byte_waits_and_is_replaced(every_kind):
    for tokenizer in every_kind.values():
        byte = _byte_ids(tokenizer)
        lead, a = byte[b"\xf0"], byte[b"a"]
        assert _deltas(tokenizer, [lead, a, a]) == ["", "\ufffda", "a", ""]
        assert _deltas(tokenizer, [a, lead]) == ["a", "", "\ufffd"]


def test_the_first_space_goes_once(every_kind):
    tokenizer = every_kind["sentencepiece"]
    ids = tokenizer.encode("Hello Hello", add_special=False)
    assert _deltas(tokenizer, ids) == ["Hello", " Hello", ""]
    assert _deltas(tokenizer, ids[1:]) == ["Hello", ""]
    assert _deltas(tokenizer, [1, 2, *ids]) == ["", "", "Hello", " Hello", ""]


@pytest.mark.parametrize("seed", range(5))
def test_ten_thousand_random_sequences(every_kind, seed):
    rng = random.Random(seed)
    for tokenizer in every_kind.values():
        byte = _byte_ids(tokenizer)
        odd = [i for piece, i in byte.items() if piece[0] >= 0x80 or piece == b" "]
        wide = [-1, tokenizer.vocab_size + 3, *range(6)]
        for _ in range(400):
            ids = [
                rng.choice(rng.choice((odd, wide, range(tokenizer.vocab_size))))
                for _ in range(rng.randrange(12))
            ]
            skip = rng.random() < 0.5
            deltas = _deltas(tokenizer, ids, skip_special=skip)
            assert "".join(deltas) == tokenizer.decode(ids, skip_special=skip), ids


def test_several_ids_at_once(every_kind):
    tokenizer = every_kind["gguf, byte level"]
    ids = tokenizer.encode("größe 🔥 naïve")
    stream = IncrementalDetokenizer(tokenizer)
    assert stream.add(ids[:4]) + stream.add(ids[4:]) + stream.finish() == "größe 🔥 naïve"
    assert IncrementalDetokenizer(tokenizer).add([]) == ""


def test_all_invalid_bytes_match_a_whole_decode(every_kind):
    tokenizer = every_kind["gguf, byte level"]
    byte = _byte_ids(tokenizer)
    for text in (
        b"\xed\xa0\x80",
        b"\xf4\x90\x80\x80",
        b"\xc0\xaf",
        b"\xe2\x82",
        b"\xff\xfe\xf0\x9f",
    ):
        ids = [byte[bytes([b])] for b in text]
        assert "".join(_deltas(tokenizer, ids)) == text.decode("utf-8", "replace")
        assert tokenizer.decode(ids) == text.decode("utf-8", "replace")


def test_decoding_equals_the_library(every_kind, bpe):
    rng = random.Random(3)
    tokenizer = every_kind["json, byte level"]
    for _ in range(500):
        ids = rng.choices(range(tokenizer.vocab_size), k=10)
        assert tokenizer.decode(ids) == bpe.decode(ids)
        assert tokenizer.decode(ids, skip_special=False) == bpe.decode(
            ids, skip_special_tokens=False
        )


def test_what_is_held_does_not_grow(every_kind):
    tokenizer = every_kind["gguf, byte level"]
    lead = _byte_ids(tokenizer)[b"\xf0"]
    stream = IncrementalDetokenizer(tokenizer)
    for _ in range(1000):
        stream.add(lead)
        waiting, _ = stream._utf8.getstate()
        assert len(waiting) <= 3
