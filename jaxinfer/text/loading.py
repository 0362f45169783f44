"""`load_tokenizer`: finds the tokenizer files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxinfer.text.hugging_face import tokenizer_from_json
from jaxinfer.text.sentence_piece import tokenizer_from_sentencepiece
from jaxinfer.text.template import ChatTemplate
from jaxinfer.text.tokenizer import Tokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of the folder `path`: its `tokenizer.json`, or else its `tokenizer.model`.

    `tokenizer_config.json`, `special_tokens_map.json` and `chat_template.jinja` are read where
    present. Errors: FileNotFoundError if the folder has neither tokenizer file.
    """
    folder = Path(path)
    config = _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")
    template = _chat_template(folder, config)
    if (file := folder / "tokenizer.json").is_file():
        text = file.read_text(encoding="utf-8")
        return tokenizer_from_json(text, config, chat_template=template)
    if (file := folder / "tokenizer.model").is_file():
        return tokenizer_from_sentencepiece(file.read_bytes(), config, chat_template=template)
    raise FileNotFoundError(
        f"{folder} holds neither tokenizer.json nor tokenizer.model. "
        "Copy one of them there, save the folder with tokenizer_source=, or use a GGUF file, which "
        "carries its tokenizer."
    )


def _json(file: Path) -> dict[str, Any]:
    """The content of a JSON file, or nothing where there is none."""
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _chat_template(folder: Path, config: dict[str, Any]) -> ChatTemplate | None:
    """The folder's chat template: its own file, or the configuration's (the default of several)."""
    if (file := folder / "chat_template.jinja").is_file():
        return ChatTemplate(file.read_text(encoding="utf-8"))
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default") or next(iter(named.values()), None)
    return ChatTemplate(source) if source else None
