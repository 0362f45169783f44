"""Byte-level BPE: the characters that stand for bytes, and how its text is cut before merging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from tokenizers import Regex, pre_tokenizers


def _byte_of_character() -> dict[str, int]:
    """The byte behind each character of a byte-level vocabulary.

    Printable characters of Latin-1 stand for themselves; the other bytes, in order, for U+0100
    onwards (Radford et al., 2019).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(0x100 + n): byte for n, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


BYTE_OF_CHARACTER = _byte_of_character()


def piece_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; a token with other characters stands for its own text."""
    try:
        return bytes(map(BYTE_OF_CHARACTER.__getitem__, token))
    except KeyError:
        return token.encode("utf-8")


@final
@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """How one kind of byte-level BPE prepares text.

    Attributes:
        splits: expressions whose matches, in this order, become pieces of their own.
        words: cut what is left into words as GPT-2 does.
        ignore_merges: a piece that is in the vocabulary is one token, whatever the merges say.
        nfc: compose characters first (Unicode form C).
        bos: put the BOS before a text when the file does not say.
    """

    splits: tuple[str, ...] = ()
    words: bool = False
    ignore_merges: bool = False
    nfc: bool = False
    bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The pipeline of the `tokenizers` library."""
        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.splits
        ]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.words))
        return pre_tokenizers.Sequence(steps)


CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(suffix: str, digits: str) -> str:
    """The expression that also cuts words where lower case turns into upper."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{start}{UPPER}*{LOWER}+{suffix}|{start}{UPPER}+{LOWER}*{suffix}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
    )


GPT_2 = PreTokenizer(words=True)
SINGLE_DIGITS = PreTokenizer(splits=(r"\p{N}",), words=True)
LLAMA_3 = PreTokenizer(
    splits=(rf"{CONTRACTIONS}|{WORD}|\p{{N}}{{1,3}}|{SYMBOLS}|{SPACES}",),
    ignore_merges=True,
    bos=True,
)
QWEN_2 = PreTokenizer(splits=(rf"{CONTRACTIONS}|{WORD}|\p{{N}}|{SYMBOLS}|{SPACES}",), nfc=True)
GPT_4O = PreTokenizer(splits=(_cased(f"{CONTRACTIONS}?", r"\p{N}{1,3}"),))
DEEPSEEK_CODER = PreTokenizer(
    splits=(
        r"[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        "[一-龥\u0800-一가-\ud7ff]+",
        r"\p{N}",
    )
)
DEEPSEEK_V3 = PreTokenizer(
    splits=(
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"[!-/:-~&&[\p{P}\p{S}]][A-Za-z]+"
        r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*"
        rf"|{SPACES}",
    )
)

# By the name that GGUF files give in `tokenizer.ggml.pre`.
PRE_TOKENIZERS = {
    "gpt-2": GPT_2,
    "phi-2": GPT_2,
    "smollm": SINGLE_DIGITS,
    "starcoder": SINGLE_DIGITS,
    "refact": SINGLE_DIGITS,
    "command-r": PreTokenizer(splits=(r"\p{N}",), words=True, nfc=True),
    "llama-bpe": LLAMA_3,
    "llama3": LLAMA_3,
    "llama-v3": LLAMA_3,
    "qwen2": QWEN_2,
    "deepseek-r1-qwen": QWEN_2,
    "gpt-4o": GPT_4O,
    "llama4": GPT_4O,
    "tekken": PreTokenizer(splits=(_cased("", r"\p{N}"),), ignore_merges=True, bos=True),
    "deepseek-coder": DEEPSEEK_CODER,
    "deepseek-v3": DEEPSEEK_V3,
}
