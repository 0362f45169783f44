"""Chat messages to token ids: the one path that every entry point takes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.config import require
from jaxinfer.text.template import ChatTemplate, Message, check_messages
from jaxinfer.text.tokenizer import Tokenizer

# Unicode keeps these for use inside a program: no text should hold them, and hardly any does.
NONCHARACTERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    template: ChatTemplate | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **extra: Any,
) -> list[int]:
    """The ids of `messages`, rendered by `template` (the tokenizer's own if None), with one BOS.

    Only the template's own text becomes control tokens: what the messages, tools, documents and
    `extra` say is encoded as ordinary text. Without such text in them the ids are those of the
    rendered text.

    Errors: ValueError for malformed messages or a tokenizer without a template, ChatTemplateError.
    """
    template = template or tokenizer.chat_template
    if template is None:
        raise ValueError("The tokenizer has no chat template. Pass one, or use a plain prompt.")
    check_messages(messages)
    request = {"messages": messages, "tools": tools, "documents": documents, **extra}
    mark = _unused_character(json.dumps(request, ensure_ascii=False, default=str) + template.source)
    control = tokenizer.vocabulary.control
    text = template.render(
        **{name: control.marked(value, mark) for name, value in request.items()},
        add_generation_prompt=add_generation_prompt,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
    )
    return tokenizer.encode_rendered(text, mark=mark)


def _unused_character(text: str) -> str:
    """A noncharacter that `text` does not hold."""
    mark = next((c for c in NONCHARACTERS if c not in text), "")
    require(
        mark != "",
        "The messages hold all 32 noncharacters U+FDD0 to U+FDEF. Remove one of them.",
    )
    return mark
