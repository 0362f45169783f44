"""`Tokenizer`: text to token ids and back, the same whatever file it came from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, final

from jaxinfer.text.control import ControlTokens
from jaxinfer.text.template import ChatTemplate

ALL_SPACES = 1 << 62


# Where a piece of text stands: it decides whether a tokenizer puts a space before it.
Place = Literal["start", "after control", "inside"]


class Encoder(Protocol):
    """Ordinary text to ids: what the library behind a tokenizer file has to do."""

    def encode(self, text: str, place: Place) -> list[int]:
        """The ids of `text`."""
        ...


@final
@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """What every id stands for.

    Attributes:
        pieces: the bytes of each id (unused ids have none).
        control: the tokens that steer the model; ordinary text never becomes one of them.
        hidden: the ids that `decode` leaves out unless told otherwise.
        dropped_spaces: most spaces that decoding drops from the start of a text.
        prefix_ids: what goes before a text, as a rule the BOS.
        eos_ids: every id that ends an output.
    """

    pieces: tuple[bytes, ...]
    control: ControlTokens
    hidden: frozenset[int]
    dropped_spaces: int
    prefix_ids: tuple[int, ...]
    bos_id: int | None
    eos_id: int | None
    eos_ids: frozenset[int]


@final
class Tokenizer:
    """Text to ids and back.

    Decoding is a concatenation of bytes read as UTF-8: ill-formed bytes become U+FFFD, spaces are
    never cleaned up, an id outside the vocabulary (a padded row of the output head) stands for no
    bytes.
    """

    def __init__(
        self, encoder: Encoder, vocabulary: Vocabulary, *, chat_template: ChatTemplate | None = None
    ):
        self._encoder = encoder
        self.vocabulary = vocabulary
        self.chat_template = chat_template

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return len(self.vocabulary.pieces)

    @property
    def bos_id(self) -> int | None:
        """The id that begins a text, if the tokenizer names one."""
        return self.vocabulary.bos_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every id that ends an output, in order: EOS of the file and the end-of-turn tokens."""
        return tuple(sorted(self.vocabulary.eos_ids))

    @property
    def bos_token(self) -> str:
        """The text of the BOS, as chat templates want it; "" without one."""
        return self._text_of(self.vocabulary.bos_id)

    @property
    def eos_token(self) -> str:
        """The text of the file's own EOS, as chat templates want it; "" without one."""
        return self._text_of(self.vocabulary.eos_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that `token_id` stands for; none for an id outside the vocabulary."""
        pieces = self.vocabulary.pieces
        return pieces[token_id] if 0 <= token_id < len(pieces) else b""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """The ids of ordinary text: the text of a control token in it is text like any other.

        `add_special` puts what the tokenizer wants before a text (the BOS). Nothing is put behind
        it: a prompt is there to be continued.
        """
        prefix = self.vocabulary.prefix_ids if add_special else ()
        return [*prefix, *self._ordinary(_well_formed(text), "start")]

    def encode_rendered(self, text: str, *, add_special: bool = True, mark: str = "") -> list[int]:
        """The ids of a template's output, in which the text of a control token is that token.

        `add_special` puts the BOS before it unless the template did. `mark` is a character that is
        taken out of the text once the control tokens are found (see `ControlTokens.marked`).
        """
        ids: list[int] = []
        place: Place = "start"
        for plain, control_id in self.vocabulary.control.split(_well_formed(text)):
            ordinary = plain.replace(mark, "") if mark else plain
            ids += self._ordinary(ordinary, place)
            if control_id is not None:
                ids.append(control_id)
                place = "after control"
        prefix = list(self.vocabulary.prefix_ids) if add_special else []
        return ids if ids[: len(prefix)] == prefix else prefix + ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; `skip_special` leaves control tokens out."""
        hidden = self.vocabulary.hidden if skip_special else frozenset()
        data = b"".join(self.token_bytes(i) for i in ids if i not in hidden)
        spaces = len(data) - len(data.lstrip(b" "))
        return data[min(spaces, self.vocabulary.dropped_spaces) :].decode("utf-8", "replace")

    def _ordinary(self, text: str, place: Place) -> list[int]:
        """The ids of `text`, none of them a control token."""
        if not text:
            return []
        ids = self._encoder.encode(text, place)
        control = self.vocabulary.control
        if control.ids.isdisjoint(ids):
            return ids
        # A library that finds control text by itself does not find it in parts.
        head, *tail = control.broken(text)
        ids = self._encoder.encode(head, place)
        for part in tail:
            ids += self._encoder.encode(part, "inside")
        assert control.ids.isdisjoint(ids), "parts of control text became a control token"
        return ids

    def _text_of(self, token_id: int | None) -> str:
        return "" if token_id is None else self.token_bytes(token_id).decode("utf-8", "replace")


def _well_formed(text: str) -> str:
    """`text`, or ValueError if it cannot be written as UTF-8."""
    if not isinstance(text, str):
        raise TypeError(f"A text of type {type(text).__name__} cannot be encoded. Pass a str.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"The text holds a lone surrogate at index {error.start}, which UTF-8 cannot write. "
            "Replace it, for instance with U+FFFD."
        ) from None
    return text
