"""Tokenizers from GGUF metadata: the pre-tokenizer counts, unknown names are refused."""

import pytest

from jaxinfer.text import tokenizer_from_gguf
from jaxinfer.text.byte_level import BYTE_OF_CHARACTER, PRE_TOKENIZERS

CHARACTER = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}


def _metadata(pre: str, *words: str) -> dict:
    """A vocabulary of all bytes and `words`, each merged from the left."""
    spelled = ["".join(CHARACTER[b] for b in word.encode()) for word in words]
    tokens = [CHARACTER[b] for b in range(256)]
    merges = []
    for word in spelled:
        for n in range(2, len(word) + 1):
            if word[:n] not in tokens:
                tokens.append(word[:n])
                merges.append(f"{word[: n - 1]} {word[n - 1]}")
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
    }


def _pieces(pre: str, text: str, *words: str) -> list[str]:
    tokenizer = tokenizer_from_gguf(_metadata(pre, *words))
    return [tokenizer.token_bytes(i).decode() for i in tokenizer.encode(text, add_special=False)]


def test_the_byte_alphabet_is_a_bijection():
    assert sorted(BYTE_OF_CHARACTER.values()) == list(range(256))
    assert BYTE_OF_CHARACTER["Ġ"] == 0x20
    assert BYTE_OF_CHARACTER["Ċ"] == 0x0A
    assert BYTE_OF_CHARACTER["A"] == 0x41


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        # smollm splits single digits, and only then cuts words: " 1" is not one piece
        ("smollm", ["a", "  ", "1", "2", "3", "4"]),
        ("gpt-2", ["a", " ", " 1234"]),
        ("llama-bpe", ["a", " ", " ", "123", "4"]),
        ("qwen2", ["a", " ", " ", "1", "2", "3", "4"]),
        ("gpt-4o", ["a", " ", " ", "123", "4"]),
        ("tekken", ["a", " ", " ", "1", "2", "3", "4"]),
        ("deepseek-coder", ["a", "  ", "1", "2", "3", "4"]),
        ("deepseek-v3", ["a", "  ", "123", "4"]),
    ],
)
def test_digits_and_spaces(pre, expected):
    assert _pieces(pre, "a  1234", "  ", " 1234", "1234", "123") == expected


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "I'll HelloWorld", ["I", "'ll", " HelloWorld"]),
        ("llama-bpe", "I'LL x", ["I", "'LL", " ", "x"]),
        ("gpt-4o", "I'll HelloWorld", ["I'll", " Hello", "World"]),
        ("tekken", "I'll HelloWorld", ["I", "'ll", " Hello", "World"]),
        ("deepseek-v3", "!x HelloWorld", ["!x", " HelloWorld"]),
    ],
)
def test_words(pre, text, expected):
    words = ["I'll", "'ll", "'LL", " HelloWorld", "World", "!x"]
    assert _pieces(pre, text, *words) == expected


def test_qwen_composes_characters():
    assert _pieces("qwen2", "e\u0301", "é") == ["é"]
    assert tokenizer_from_gguf(_metadata("gpt-2", "é")).encode("e\u0301")[0] == ord("e")


def test_ignore_merges_takes_whole_pieces():
    metadata = _metadata("llama-bpe", "ab")
    metadata["tokenizer.ggml.tokens"].append("abcd")  # no merge leads to it
    assert tokenizer_from_gguf(metadata).encode("abcd") == [
        len(metadata["tokenizer.ggml.tokens"]) - 1
    ]
    metadata["tokenizer.ggml.pre"] = "qwen2"
    assert len(tokenizer_from_gguf(metadata).encode("abcd")) == 3


def test_every_pre_tokenizer_loses_nothing():
    text = "Größe 12345 !?\n\n\t日本語 한국어 I'll don't\r\n  🔥 e\u0301 $x=1;"
    for name, row in PRE_TOKENIZERS.items():
        joined = "".join(piece for piece, _ in row.build().pre_tokenize_str(text))
        assert bytes(BYTE_OF_CHARACTER[c] for c in joined).decode() == text, name


def test_unknown_names_are_refused(gguf_metadata):
    gguf_metadata["tokenizer.ggml.pre"] = "default"
    with pytest.raises(ValueError, match=r"pre='default' .* Known: gpt-2, .*smollm"):
        tokenizer_from_gguf(gguf_metadata)
    gguf_metadata["tokenizer.ggml.model"] = "bert"
    with pytest.raises(ValueError, match=r"model='bert' .* Known: gpt2, llama"):
        tokenizer_from_gguf(gguf_metadata)


def test_types_of_the_wrong_length_are_refused(gguf_metadata):
    gguf_metadata["tokenizer.ggml.token_type"].pop()
    with pytest.raises(ValueError, match=r"token_type has \d+ entries for \d+ tokens"):
        tokenizer_from_gguf(gguf_metadata)


def test_bos_as_the_file_says(gguf_metadata):
    assert tokenizer_from_gguf(gguf_metadata).encode("a")[0] != 1
    gguf_metadata["tokenizer.ggml.add_bos_token"] = True
    assert tokenizer_from_gguf(gguf_metadata).encode("a")[0] == 1
    del gguf_metadata["tokenizer.ggml.add_bos_token"]
    gguf_metadata["tokenizer.ggml.pre"] = "llama-bpe"
    assert tokenizer_from_gguf(gguf_metadata).encode("a")[0] == 1


def test_user_defined_tokens_are_text_unless_they_look_like_control(gguf_metadata):
    tokens, kinds = (
        gguf_metadata["tokenizer.ggml.tokens"],
        gguf_metadata["tokenizer.ggml.token_type"],
    )
    tokens += ["<think>", "<|User|>", "õ"]
    kinds += [4, 4, 4]
    tokenizer = tokenizer_from_gguf(gguf_metadata)
    think = len(tokens) - 3
    assert tokenizer.encode("<think>") == [think]
    assert tokenizer.decode([think, think + 2]) == "<think>õ"
    assert think + 1 not in tokenizer.encode("<|User|>")
    assert tokenizer.encode_rendered("<|User|>õ") == [think + 1, think + 2]


def test_spaced_vocabulary(spaced_gguf_metadata):
    tokenizer = tokenizer_from_gguf(spaced_gguf_metadata)
    tokens = spaced_gguf_metadata["tokenizer.ggml.tokens"]
    hello = tokens.index("▁Hello")
    assert tokenizer.encode("Hello") == [1, hello]
    assert tokenizer.encode_rendered("<s>[INST]Hello") == [1, 3, hello]
    assert tokenizer.encode_rendered("<s>[INST] Hello") == [1, 3, hello]
    assert tokenizer.decode([1, hello, hello]) == "Hello Hello"

    spaced_gguf_metadata["tokenizer.ggml.add_space_prefix"] = False
    bare = tokenizer_from_gguf(spaced_gguf_metadata)
    assert bare.encode(" Hello") == [1, hello]
    assert hello not in bare.encode("Hello")
    assert bare.decode([1, hello]) == " Hello"


def test_phi3_control_tokens_take_the_space_behind_them(spaced_gguf_metadata):
    plain = tokenizer_from_gguf(spaced_gguf_metadata).encode_rendered("[INST]\nHello")
    spaced_gguf_metadata["general.architecture"] = "phi3"
    phi3 = tokenizer_from_gguf(spaced_gguf_metadata)
    hello = spaced_gguf_metadata["tokenizer.ggml.tokens"].index("▁Hello")
    assert phi3.encode_rendered("[INST]\nHello") == [1, 3, hello]
    assert plain != [1, 3, hello]


def test_a_second_unknown_token_is_no_obstacle(spaced_gguf_metadata):
    spaced_gguf_metadata["tokenizer.ggml.tokens"].append("[PAD430]")
    spaced_gguf_metadata["tokenizer.ggml.scores"].append(-1000.0)
    spaced_gguf_metadata["tokenizer.ggml.token_type"].append(2)
    tokenizer = tokenizer_from_gguf(spaced_gguf_metadata)
    assert tokenizer.vocab_size - 1 not in tokenizer.encode("[PAD430]")
