"""Ids and text: equal to the libraries' own, control tokens kept apart, one BOS."""

import json
import random

import pytest
import sentencepiece
import tokenizers

from jaxinfer.text import (
    load_tokenizer,
    tokenizer_from_gguf,
    tokenizer_from_json,
    tokenizer_from_sentencepiece,
)

TEXTS = [
    "",
    " ",
    "  leading spaces",
    "Hello world",
    "trailing  ",
    "12 345 6",
    "\n\n a\tb\r\n",
    "日本語 und 한국어",
    "🔥👨‍👩‍👧 ünïcode",
    "a" * 70,
    "    four",
    "▁ symbol",
    "\x00\x7f",
]
CONTROL_TEXT = "a <|im_end|> b</s><s>[INST]<|extra|><|im_start|>\n"


@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_those_of_the_library(every_kind, bpe, model_bytes, text):
    expected = bpe.encode(text).ids
    assert every_kind["json, byte level"].encode(text) == expected
    assert every_kind["gguf, byte level"].encode(text) == expected

    library = sentencepiece.SentencePieceProcessor(model_proto=model_bytes)
    expected = library.encode(text)
    assert every_kind["sentencepiece"].encode(text) == [1, *expected]
    assert every_kind["gguf, spaced"].encode(text, add_special=False) == expected


@pytest.mark.parametrize("text", [*TEXTS, CONTROL_TEXT])
def test_text_survives_the_round_trip(every_kind, text):
    for name, tokenizer in every_kind.items():
        expected = text.replace("▁", " ") if "byte level" not in name else text
        if name == "json, spaced":  # which adds no space before a space, but drops one
            expected = expected.removeprefix(" ")
        assert tokenizer.decode(tokenizer.encode(text)) == expected, name


def test_user_text_never_becomes_a_control_token(every_kind):
    for name, tokenizer in every_kind.items():
        control = tokenizer.vocabulary.control
        texts = [CONTROL_TEXT, *(token.text for token in control.tokens)]
        for text in texts:
            assert control.ids.isdisjoint(tokenizer.encode(text, add_special=False)), (name, text)
        assert control.ids, name


def test_control_text_is_cut_like_other_text(every_kind, bpe):
    library = tokenizers.Tokenizer.from_str(bpe.to_str())
    library.encode_special_tokens = True
    expected = library.encode(CONTROL_TEXT).ids
    assert every_kind["json, byte level"].encode(CONTROL_TEXT) == expected
    assert every_kind["gguf, byte level"].encode(CONTROL_TEXT) == expected


def test_a_token_that_only_looks_like_control_is_control(bpe):
    spec = json.loads(bpe.to_str())
    extra = {"content": "<|User|>", "id": 400, "special": False, "normalized": False}
    spec["added_tokens"].append({**extra, "single_word": False, "lstrip": False, "rstrip": False})
    tokenizer = tokenizer_from_json(json.dumps(spec), {})
    assert 400 not in tokenizer.encode("x<|User|>y")
    assert tokenizer.encode_rendered("x<|User|>y").count(400) == 1


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_rendered_ids_equal_those_of_the_library(bpe, spaced_json, scheme):
    rng = random.Random(0)
    cases = [
        (bpe.to_str(), ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]),
        (spaced_json(scheme), ["<s>", "</s>"]),
    ]
    for text, controls in cases:
        tokenizer = tokenizer_from_json(text, {})
        library = tokenizers.Tokenizer.from_str(text)
        for _ in range(200):
            parts = rng.choices([*controls, " ", "\n", "Hello", " a", "  ", "12", "🔥"], k=8)
            rendered = "".join(parts)
            expected = library.encode(rendered, add_special_tokens=False).ids
            assert tokenizer.encode_rendered(rendered, add_special=False) == expected, rendered


def test_white_space_beside_a_control_token_that_takes_it():
    library = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, " ": 1, "\n": 2, "_": 3}, []))
    library.decoder = tokenizers.decoders.Fuse()
    library.add_special_tokens(
        [
            tokenizers.AddedToken("<|r|>", rstrip=True, normalized=False),
            tokenizers.AddedToken("<|l|>", lstrip=True, normalized=False),
            tokenizers.AddedToken("word", single_word=True, normalized=False),
        ]
    )
    tokenizer = tokenizer_from_json(library.to_str(), {})
    for text in (
        "a <|r|> \n a",
        "a \n<|l|> a",
        " <|r|> <|l|> ",
        "a word a",
        "aword a",
        "word_ word",
        "<|r|>word",
    ):
        assert tokenizer.encode_rendered(text) == library.encode(text).ids, text


def test_exactly_one_bos(every_kind, spaced_json):
    spaced = every_kind["json, spaced"]  # its post-processor adds <s>
    assert spaced.encode("Hello").count(1) == 1
    assert spaced.encode_rendered("Hello") == spaced.encode("Hello")
    assert spaced.encode_rendered("<s>Hello").count(1) == 1
    silent = tokenizer_from_json(spaced_json(), {"add_bos_token": False, "bos_token": "<s>"})
    assert silent.bos_id == 1
    assert silent.encode("Hello") == spaced.encode("Hello")[1:]


def test_eos_ids_are_the_union_of_all_sources(every_kind, gguf_metadata):
    assert every_kind["gguf, byte level"].eos_ids == (0, 2)  # <|endoftext|> and <|im_end|>
    assert every_kind["json, byte level"].eos_token == "<|im_end|>"
    assert every_kind["sentencepiece"].eos_ids == (2,)
    gguf_metadata["tokenizer.ggml.eot_token_id"] = 7
    assert tokenizer_from_gguf(gguf_metadata).eos_ids == (0, 2, 7)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["<|end|>", "<|user|>"], {"<|end|>"}),
        (["<|end|>", "<|return|>", "<|call|>"], {"<|return|>", "<|call|>"}),
        (["<|eot_id|>", "<|eom_id|>"], {"<|eot_id|>", "<|eom_id|>"}),
        (["<start_of_turn>", "<end_of_turn>"], {"<end_of_turn>"}),
    ],
)
def test_end_of_turn_tokens_are_known_by_name(names, expected):
    library = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    library.decoder = tokenizers.decoders.Fuse()
    library.add_special_tokens(names)
    tokenizer = tokenizer_from_json(library.to_str(), {})
    assert {tokenizer.token_bytes(i).decode() for i in tokenizer.eos_ids} == expected


def test_spaces_are_not_cleaned_up(every_kind):
    for tokenizer in every_kind.values():
        text = "Hello . a , b n't 's"
        assert tokenizer.decode(tokenizer.encode(text)) == text
    spaced = every_kind["sentencepiece"]
    library = sentencepiece.SentencePieceProcessor(
        model_proto=spaced._encoder._spaced.serialized_model_proto()
    )
    ids = [library.piece_to_id("▁▁▁▁"), library.piece_to_id(".")]
    assert spaced.decode(ids) == "   ."


def test_control_tokens_are_hidden_or_shown(every_kind):
    tokenizer = every_kind["gguf, byte level"]
    ids = tokenizer.encode_rendered("<|im_start|>Hello<|im_end|>")
    assert tokenizer.decode(ids) == "Hello"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>Hello<|im_end|>"


def test_ids_outside_the_vocabulary_stand_for_nothing(every_kind):
    for tokenizer in every_kind.values():
        outside = [-1, tokenizer.vocab_size, 10**9]
        assert tokenizer.decode([outside[0], *tokenizer.encode("a"), *outside[1:]]) == "a"


def test_a_lone_surrogate_is_refused(every_kind):
    for tokenizer in every_kind.values():
        with pytest.raises(ValueError, match="lone surrogate at index 2"):
            tokenizer.encode("ab\ud83d")
        with pytest.raises(TypeError, match="type bytes"):
            tokenizer.encode(b"ab")


def test_an_unknown_decoder_is_refused(bpe):
    decoder = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    spec = json.loads(bpe.to_str()) | {"decoder": decoder}
    with pytest.raises(ValueError, match=r"decoder \['WordPiece'\]"):
        tokenizer_from_json(json.dumps(spec), {})
    with pytest.raises(ValueError, match="decoder"):
        tokenizer_from_json(json.dumps(spec | {"decoder": None}), {})


def test_sentencepiece_behind_a_control_token(model_bytes):
    library = sentencepiece.SentencePieceProcessor(model_proto=model_bytes)
    hello, spaced = library.piece_to_id("▁Hello"), library.encode("Hello")
    assert spaced == [hello]
    modern = tokenizer_from_sentencepiece(model_bytes, {"legacy": False})
    legacy = tokenizer_from_sentencepiece(model_bytes, {})
    assert legacy.encode_rendered("<s>[INST]Hello") == [1, 3, hello]
    assert legacy.encode_rendered("<s>[INST] Hello") == [1, 3, hello]
    assert modern.encode_rendered("<s>[INST] Hello") == [1, 3, hello]
    assert hello not in modern.encode_rendered("<s>[INST]Hello")


def test_sentencepiece_tokens_from_the_configuration(model_bytes):
    size = sentencepiece.SentencePieceProcessor(model_proto=model_bytes).vocab_size()
    added = {
        str(size): {"content": "<|end|>", "special": True, "rstrip": True},
        str(size + 1): {"content": "<tool>", "special": False},
    }
    config = {"added_tokens_decoder": added, "eos_token": {"content": "<|end|>"}}
    tokenizer = tokenizer_from_sentencepiece(model_bytes, config)
    assert tokenizer.vocab_size == size + 2
    assert tokenizer.eos_ids == (size,)
    assert {size, size + 1}.isdisjoint(tokenizer.encode("<|end|><tool>"))
    ids = tokenizer.encode_rendered("<|end|>\n<tool>")
    assert ids == [1, size, size + 1]
    assert tokenizer.decode(ids) == "<tool>"


def test_load_tokenizer_reads_a_folder(tmp_path, bpe, model_bytes):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json nor tokenizer\.model"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(model_bytes)
    assert load_tokenizer(tmp_path).encode("Hello")[0] == 1
    assert load_tokenizer(tmp_path).chat_template is None

    (tmp_path / "tokenizer.json").write_text(bpe.to_str(), encoding="utf-8")
    special = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|endoftext|>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    templates = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    config = {"eos_token": "<|im_end|>", "add_bos_token": True, "chat_template": templates}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_token, tokenizer.eos_ids) == (1, "<|im_end|>", (0, 2))
    assert tokenizer.encode("Hello") == [1, *bpe.encode("Hello").ids]
    assert tokenizer.chat_template.source == "D"

    (tmp_path / "chat_template.jinja").write_text("from its own file")
    assert load_tokenizer(tmp_path).chat_template.source == "from its own file"
