"""Tiny tokenizers of every kind, trained in code."""

import io
import json

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxinfer.text import (
    tokenizer_from_gguf,
    tokenizer_from_json,
    tokenizer_from_sentencepiece,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps.",
    "What is the capital of France? The capital of France is Paris.",
    "Hello Hello Hello Hello user assistant system Hello world, hello there 12 34 2024 3.14",
    "    indented text\n\n  def f(x):\n    return x + 1\n",
    "größe naïve 日本語 한국어 🔥🔥 emoji",
] * 4
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER_DEFINED = ["▁▁▁▁", "<|extra|>"]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_bpe() -> tokenizers.Tokenizer:
    """A byte-level BPE of about 400 tokens; the special ones are 0, 1 and 2."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(CORPUS, trainer)
    return library


def sentence_piece_model() -> bytes:
    """A SentencePiece BPE model: <unk> 0, <s> 1, </s> 2, [INST] 3, [/INST] 4, then bytes."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=out,
        model_type="bpe",
        vocab_size=430,
        byte_fallback=True,
        control_symbols=["[INST]", "[/INST]"],
        user_defined_symbols=USER_DEFINED,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        character_coverage=0.98,
        minloglevel=2,
    )
    return out.getvalue()


def gguf_of_bpe(library: tokenizers.Tokenizer, *, pre: str = "gpt-2") -> dict:
    """The GGUF metadata of a byte-level BPE."""
    model = json.loads(library.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if t in SPECIALS else 1 for t in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHATML,
    }


def gguf_of_sentence_piece(model: bytes) -> dict:
    """The GGUF metadata of a SentencePiece model."""
    library = sentencepiece.SentencePieceProcessor(model_proto=model)
    kinds = {2: library.is_unknown, 3: library.is_control, 6: library.is_byte}
    user_defined = [library.piece_to_id(text) for text in USER_DEFINED]
    ids = range(library.vocab_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [library.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [library.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [
            next((k for k, test in kinds.items() if test(i)), 4 if i in user_defined else 1)
            for i in ids
        ],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def metaspace_json(prepend: str = "first") -> str:
    """A `tokenizer.json` in the manner of Llama 2: spaces as U+2581, bytes for the rest."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256))]
    words = ["▁", "H", "e", "l", "o", "He", "ll", "Hell", "Hello", "▁Hello", "▁▁", "a", "▁a", "."]
    vocab = {token: i for i, token in enumerate([*tokens, *words])}
    merges = ["H e", "l l", "He ll", "Hell o", "▁ Hello", "▁ ▁", "▁ a"]
    library = tokenizers.Tokenizer(
        models.BPE(vocab, [tuple(m.split()) for m in merges], unk_token="<unk>", byte_fallback=True)
    )
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return library.to_str()


@pytest.fixture(scope="session")
def bpe():
    """The `tokenizers` object of the tiny byte-level BPE."""
    return byte_bpe()


@pytest.fixture(scope="session")
def model_bytes():
    """The serialised tiny SentencePiece model."""
    return sentence_piece_model()


@pytest.fixture(scope="session")
def every_kind(bpe, model_bytes):
    """One tokenizer of each kind, by name."""
    return {
        "json, byte level": tokenizer_from_json(bpe.to_str(), {"eos_token": "<|im_end|>"}),
        "json, spaced": tokenizer_from_json(metaspace_json(), {"eos_token": "</s>"}),
        "sentencepiece": tokenizer_from_sentencepiece(model_bytes, {}),
        "gguf, byte level": tokenizer_from_gguf(gguf_of_bpe(bpe)),
        "gguf, spaced": tokenizer_from_gguf(gguf_of_sentence_piece(model_bytes)),
    }


@pytest.fixture
def gguf_metadata(bpe):
    """GGUF metadata of the byte-level BPE, a copy for each test."""
    return gguf_of_bpe(bpe)


@pytest.fixture
def spaced_gguf_metadata(model_bytes):
    """GGUF metadata of the SentencePiece model, a copy for each test."""
    return gguf_of_sentence_piece(model_bytes)


@pytest.fixture
def spaced_json():
    """A function from the prepend scheme to a Llama-like `tokenizer.json`."""
    return metaspace_json


@pytest.fixture
def chat_tokenizer(bpe):
    """A byte-level tokenizer with a ChatML template."""
    return tokenizer_from_gguf(gguf_of_bpe(bpe))
