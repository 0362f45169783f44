"""A `ModelConfig` as JSON and back: every field, by its own name."""

from __future__ import annotations

import dataclasses
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from jaxinfer.config import ModelConfig, require


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """What `json` writes of `config`; tuples become lists there."""
    return dataclasses.asdict(config)


def config_from_json(content: Any) -> ModelConfig:
    """The inverse of `config_to_json`; a field that is absent has its default.

    Raises ValueError for unknown fields, missing ones without a default, and wrong values.
    """
    try:
        return _revive(ModelConfig, content)
    except TypeError as error:
        raise ValueError(f"the model's settings cannot be read ({error})") from error


def _revive(kind: Any, value: Any) -> Any:
    """`value` as read from JSON, as what the annotation `kind` says."""
    if get_origin(kind) in (Union, UnionType) and value is not None:
        kind = next(choice for choice in get_args(kind) if choice is not NoneType)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type) and value is not None:
        require(isinstance(value, dict), f"{kind.__name__} is not a JSON object")
        unknown = sorted(set(value) - {field.name for field in dataclasses.fields(kind)})
        require(not unknown, f"{kind.__name__} has no field {', '.join(unknown)}")
        hints = get_type_hints(kind)
        return kind(**{name: _revive(hints[name], item) for name, item in value.items()})
    if isinstance(value, list):
        item_kind = next(iter(get_args(kind)), Any)
        return tuple(_revive(item_kind, item) for item in value)
    return value
