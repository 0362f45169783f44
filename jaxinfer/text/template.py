"""`ChatTemplate`: messages to text, by the model's own Jinja template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxinfer.config import require

Message = Mapping[str, Any]


class ChatTemplateError(ValueError):
    """A chat template does not compile, or refuses the messages."""


@final
class ChatTemplate:
    """A chat template, compiled when it is first used, in a sandbox that cannot change its input.

    It sees what templates of the Hugging Face hub expect: `messages`, `tools`, `documents`,
    `add_generation_prompt`, `bos_token`, `eos_token`, the functions `raise_exception` and
    `strftime_now`, and a `tojson` that escapes no characters.
    """

    def __init__(self, source: str):
        self.source = source

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        bos_token: str = "",
        eos_token: str = "",
        **extra: Any,
    ) -> str:
        """The text for `messages`; `extra` are further variables that the template may read.

        Errors: ValueError for malformed messages, ChatTemplateError for what the template refuses.
        """
        check_messages(messages)
        given = {"tools": tools, "documents": documents}
        try:
            template, absent = self._compiled
            return template.render(
                absent
                | {name: value for name, value in given.items() if value is not None}
                | extra,
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                bos_token=bos_token,
                eos_token=eos_token,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise ChatTemplateError(f"The chat template refuses the messages: {error}") from error

    @cached_property
    def _compiled(self) -> tuple[jinja2.Template, dict[str, None]]:
        """The template, and the variables that are None when not given.

        Those are the ones that it compares with none; others are undefined, over which it may loop.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        tests = environment.parse(self.source).find_all(nodes.Test)
        compared = [test.node for test in tests if test.name == "none"]
        names = {node.name for node in compared if isinstance(node, nodes.Name)}
        absent = dict.fromkeys(names & {"tools", "documents"})
        return environment.from_string(self.source), absent


def render_chat(template: ChatTemplate | str, messages: Sequence[Message], **variables: Any) -> str:
    """The text for `messages`; `variables` as in `ChatTemplate.render`."""
    compiled = ChatTemplate(template) if isinstance(template, str) else template
    return compiled.render(messages, **variables)


def check_messages(messages: Sequence[Message]) -> None:
    """Raises ValueError unless `messages` are mappings with a role and content, at least one."""
    require(
        isinstance(messages, Sequence) and not isinstance(messages, str) and len(messages) > 0,
        'messages must be a non-empty list such as [{"role": "user", "content": "Hello"}].',
    )
    for n, message in enumerate(messages):
        require(
            isinstance(message, Mapping),
            f"messages[{n}] is a {type(message).__name__}. "
            'Make it a mapping with "role" and "content".',
        )
        role = message.get("role")
        require(
            isinstance(role, str) and role != "",
            f'messages[{n}] has role {role!r}. Give it a name such as "user".',
        )
        content = message.get("content")
        require(
            isinstance(content, str)
            or (isinstance(content, list | tuple) and all(isinstance(p, Mapping) for p in content))
            or (content is None and role == "assistant"),
            f"messages[{n}] has content of type {type(content).__name__}. "
            'Make it a string, or a list of parts such as {"type": "text", "text": "Hello"}.',
        )


class _Generation(Extension):
    """Lets text between `{% generation %}` and `{% endgeneration %}`, a training mark, stand."""

    tags = {"generation"}  # noqa: RUF012 - so declared by jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        """The body as a block of its own, with the scope of its surroundings."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.If(nodes.Const(True), body, [], [], lineno=line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
