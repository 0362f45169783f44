"""Control tokens: which tokens steer a model, and where their text stands in a rendered chat."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

# Tokens after which a model has nothing more to say, by the text that model makers give them.
END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|EOT|>",
    "<|END_OF_TURN_TOKEN|>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
)
# Formats that name `<|return|>` and `<|call|>` use `<|end|>` between the messages of one turn.
MESSAGE_END = "<|end|>"
TURN_ENDS_OF_MESSAGE_FORMATS = ("<|return|>", "<|call|>")

SENTENCE_TOKENS = ("<s>", "</s>", "<pad>", "<mask>", "<start_of_turn>", "<end_of_turn>")
BRACKETS = (("<|", "|>"), ("<｜", "｜>"))


def looks_like_control(text: str) -> bool:
    """Whether a token that its file does not call special is one all the same, by its spelling."""
    return text in SENTENCE_TOKENS or any(
        text.startswith(left) and text.endswith(right) and len(text) > len(left) + len(right)
        for left, right in BRACKETS
    )


@final
@dataclass(frozen=True, kw_only=True)
class ControlToken:
    """One control token; `lstrip` and `rstrip` say that it takes the white space beside it."""

    id: int
    text: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False

    def stands_alone(self, text: str, start: int) -> bool:
        """Whether the occurrence at `start` may be this token: a single word has none beside it."""
        end = start + len(self.text)
        beside = text[max(start - 1, 0) : start] + text[end : end + 1]
        return not self.single_word or not any(c.isalnum() or c == "_" for c in beside)


@final
class ControlTokens:
    """The control tokens of a vocabulary, and every question about their text.

    A *mark* is a character that occurs in no text of a request. Set inside a control token's text
    it keeps that text from being found; whoever encodes the text takes the marks out again.
    """

    def __init__(self, tokens: Iterable[ControlToken]):
        # One character is no control text: it could not be told from the text of a user.
        self.tokens = tuple(t for t in tokens if len(t.text) > 1)
        self.ids = frozenset(t.id for t in self.tokens)
        self._by_text = {t.text: t for t in self.tokens}
        texts = sorted(self._by_text, key=len, reverse=True)  # the longest is found first
        literal = "|".join(map(re.escape, texts)) or r"(?!)"
        self._find = re.compile(literal)
        # Looks ahead and takes one character, so that occurrences that overlap are all found.
        self._first_character = re.compile(rf"(?=(?:{literal}))(.)", re.DOTALL)
        # A token such as "endoftext" has edges that any word may have: those are left alone.
        bracketed = [text for text in texts if not (text[0].isalnum() or text[-1].isalnum())]
        self._heads = frozenset(text[:n] for text in bracketed for n in range(1, len(text)))
        self._tails = frozenset(text[-n:] for text in bracketed for n in range(1, len(text)))
        self._longest = max(map(len, texts), default=0)

    def end_ids(self) -> frozenset[int]:
        """The ids that end a turn, as far as the spelling of the tokens tells."""
        names = set(END_OF_TURN)
        if all(name in self._by_text for name in TURN_ENDS_OF_MESSAGE_FORMATS):
            names.discard(MESSAGE_END)
        return frozenset(t.id for t in self.tokens if t.text in names)

    def split(self, text: str) -> Iterator[tuple[str, int | None]]:
        """(ordinary text, id of the control token that follows it or None at the end), in order."""
        start = 0
        for match in self._find.finditer(text):
            token = self._by_text[match.group()]
            if not token.stands_alone(text, match.start()):
                continue
            plain = text[start : match.start()]
            yield plain.rstrip() if token.lstrip else plain, token.id
            start = match.end()
            while token.rstrip and text[start : start + 1].isspace():
                start += 1
        yield text[start:], None

    def broken(self, text: str) -> list[str]:
        """The parts of `text`, cut behind the first character of every control text in it."""
        cuts = [m.end() for m in self._first_character.finditer(text)]
        return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) if a < b]

    def marked(self, value: Any, mark: str) -> Any:
        """A copy of the JSON-like `value` whose strings hold no control text, nor edges of one.

        Edges matter because a template may join two strings to one: "<|im_" and "end|>".
        """
        if isinstance(value, str):
            return self._marked_text(value, mark)
        if isinstance(value, Mapping):
            return {self.marked(k, mark): self.marked(v, mark) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.marked(item, mark) for item in value]
        return value

    def _marked_text(self, text: str, mark: str) -> str:
        text = self._first_character.sub(rf"\1{mark}", text)
        body = text.strip()
        start = len(text) - len(text.lstrip())
        lengths = range(1, min(self._longest, len(body) + 1))
        head = mark if any(body[:n] in self._tails for n in lengths) else ""
        tail = mark if any(body[-n:] in self._heads for n in lengths) else ""
        end = start + len(body)
        return text[:start] + head + body + tail + text[end:]
