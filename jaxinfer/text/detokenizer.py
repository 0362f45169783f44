"""`IncrementalDetokenizer`: the text of a growing list of ids, piece by piece."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import final

from jaxinfer.text.tokenizer import Tokenizer


@final
class IncrementalDetokenizer:
    """Turns ids into text deltas; joined, they are `tokenizer.decode` of all the ids.

    What was given out is never taken back: bytes wait until they are a whole character or cannot
    become one. A step costs time in proportion to its own tokens only, and none raises.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True):
        self._tokenizer = tokenizer
        self._hidden = tokenizer.vocabulary.hidden if skip_special else frozenset()
        self._spaces_to_drop = tokenizer.vocabulary.dropped_spaces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, ids: int | Iterable[int]) -> str:
        """The text that one id, or several, add."""
        new = ids if isinstance(ids, Iterable) else (ids,)
        data = b"".join(self._tokenizer.token_bytes(i) for i in new if i not in self._hidden)
        if self._spaces_to_drop and data:
            spaces = min(len(data) - len(data.lstrip(b" ")), self._spaces_to_drop)
            data = data[spaces:]
            self._spaces_to_drop = 0 if data else self._spaces_to_drop - spaces
        return self._utf8.decode(data)

    def finish(self) -> str:
        """The text of bytes that still wait: U+FFFD for a character that never became whole."""
        return self._utf8.decode(b"", final=True)
