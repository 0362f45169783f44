"""`Fields`: reads a mapping of settings so that none is missed.

What a family understands it takes, by type; whatever is left over and not known to be harmless is
refused by name. A setting that changes the result can so never be dropped in silence.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from jaxinfer.config import require


class Fields:
    """The settings of one mapping; remembers which were taken. None counts as not given."""

    def __init__(self, values: Mapping[str, Any], source: str):
        self._values = {name: value for name, value in values.items() if value is not None}
        self._source = source
        self._taken: set[str] = set()

    def take(self, name: str, default: Any = None) -> Any:
        """The value as it stands, or `default`."""
        self._taken.add(name)
        return self._values.get(name, default)

    def integer(self, name: str, default: int | None = None) -> int:
        """An int; without a default it must be there."""
        value = self._needed(name, default)
        require(
            isinstance(value, int) and not isinstance(value, bool),
            f"{self._source}: {name}={value!r} must be an integer.",
        )
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A float; without a default it must be there."""
        value = self._needed(name, default)
        require(
            isinstance(value, int | float) and not isinstance(value, bool),
            f"{self._source}: {name}={value!r} must be a number.",
        )
        return float(value)

    def optional_integer(self, name: str) -> int | None:
        """An int, or None."""
        return None if self.take(name) is None else self.integer(name)

    def optional_number(self, name: str) -> float | None:
        """A float, or None."""
        return None if self.take(name) is None else self.number(name)

    def flag(self, name: str, default: bool = False) -> bool:
        """A bool."""
        value = self.take(name, default)
        require(isinstance(value, bool), f"{self._source}: {name}={value!r} must be true or false.")
        return value

    def choice(self, name: str, choices: Mapping[Any, Any], default: Any) -> Any:
        """What `choices` maps the value to; any other value is refused."""
        value = self.take(name, default)
        known = ", ".join(map(str, choices))
        require(
            isinstance(value, str | int | float) and value in choices,
            f"{self._source}: {name}={value!r} is not supported. Known: {known}.",
        )
        return choices[value]

    def expect(self, **wanted: Any) -> None:
        """Raises ValueError if one of these settings is given with another value."""
        for name, value in wanted.items():
            given = self.take(name, value)
            require(
                given == value,
                f"{self._source}: {name}={given!r} is not supported. Known: {value}.",
            )

    def refuse_rest(self, harmless: Collection[str] = ()) -> None:
        """Raises ValueError if a setting was neither taken nor is one of `harmless`."""
        rest = {
            name: value
            for name, value in self._values.items()
            if name not in self._taken and name not in harmless and value not in ((), [], {})
        }
        shown = ", ".join(f"{name}={str(value)[:60]}" for name, value in sorted(rest.items()))
        require(
            not rest,
            f"{self._source} sets what this engine does not support and must not ignore: {shown}. "
            "Use a model without it.",
        )

    def _needed(self, name: str, default: Any) -> Any:
        value = self.take(name, default)
        require(value is not None, f"{self._source} lacks {name}. Fetch the file again.")
        return value
