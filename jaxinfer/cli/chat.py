"""`jaxinfer chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from typing import TYPE_CHECKING

from jaxinfer.cli.answers import print_answer, speed_line
from jaxinfer.cli.options import (
    SAMPLING_OPTIONS,
    UsageError,
    add_model_options,
    add_sampling_options,
    engine_keywords,
    parse_setting,
    refuse_logprobs,
    refuse_samples,
    sampling_params,
)
from jaxinfer.cli.progress import progress_bars

if TYPE_CHECKING:
    from jaxinfer import LLM, SamplingParams

SUMMARY = "talk with a chat model"

USAGE = "--model MODEL [options]"

EXAMPLES = """\
examples:
  jaxinfer chat --model smollm2-135m
  jaxinfer chat --model smollm2-135m --system "Answer in one sentence." --temperature 0.7

in the conversation:
  /reset               forget what was said
  /system TEXT         set the system message; without TEXT: none
  /params              show the sampling parameters
  /params NAME=VALUE   set one of them
  /help                show these commands
  /quit                leave (or Ctrl-D)
Ctrl-C stops an answer; what came of it stays in the conversation.
"""

COMMANDS = EXAMPLES[EXAMPLES.index("  /reset") :].rstrip()


class Conversation:
    """What was said so far, the system message and the sampling parameters of the next answer."""

    def __init__(self, system: str | None, params: SamplingParams):
        self.system = system
        self.params = params
        self.turns: list[dict[str, str]] = []

    def messages(self, text: str) -> list[dict[str, str]]:
        """The conversation as the model is to see it when the user says `text`."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.turns, {"role": "user", "content": text}]

    def add(self, text: str, answer: str) -> None:
        """Keeps one exchange."""
        self.turns.append({"role": "user", "content": text})
        self.turns.append({"role": "assistant", "content": answer})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what this command takes to `parser`."""
    add_model_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    add_sampling_options(parser, max_tokens=1024)


def refuse_unseen(params: SamplingParams) -> None:
    """Raises UsageError if `params` ask for what a conversation does not show."""
    refuse_logprobs(params)
    refuse_samples(params, "a conversation")


def run(args: argparse.Namespace) -> int:
    """0, once the user has left."""
    params = sampling_params(args)
    refuse_unseen(params)
    conversation = Conversation(args.system, params)
    # One row decodes: a cache for more would be memory for nothing.
    keywords = {"max_num_seqs": 1, **engine_keywords(args)}
    from jaxinfer import LLM  # noqa: PLC0415  (imports jax)

    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(progress_bars(sys.stderr))
        llm = stack.enter_context(LLM(args.model, progress=progress, **keywords))
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):  # line editing, where Python has it
                import readline  # noqa: F401, PLC0415
            print(f"{args.model} is ready. /help shows the commands, Ctrl-D leaves.")
        talk(llm, conversation)
    return 0


def talk(llm: LLM, conversation: Conversation) -> None:
    """Reads lines and answers them until the user leaves."""
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\nCtrl-D or /quit leaves.")
            continue
        if line == "/quit":
            return
        try:
            if line.startswith("/"):
                print(obey(conversation, line))
            elif line:
                answer(llm, conversation, line)
        except ValueError as error:  # a bad request; the conversation goes on
            print(f"error: {error}", file=sys.stderr)


def answer(llm: LLM, conversation: Conversation, text: str) -> None:
    """Prints the model's answer to `text` and keeps both; a refused request leaves no trace."""
    given = print_answer(llm.stream_chat(conversation.messages(text), conversation.params))
    conversation.add(text, given.text)
    if given.last is not None:
        print(speed_line([given.last], given.seconds), file=sys.stderr)


def obey(conversation: Conversation, line: str) -> str:
    """What to say about the /command in `line`, now carried out; UsageError if there is none."""
    command, _, rest = line.partition(" ")
    rest = rest.strip()
    if command == "/reset":
        conversation.turns.clear()
        return "The conversation starts anew."
    if command == "/system":
        conversation.system = rest or None
        return "The system message is set." if rest else "There is no system message now."
    if command == "/params":
        if rest:
            name, value = parse_setting(rest)
            params = dataclasses.replace(conversation.params, **{name: value})
            refuse_unseen(params)
            conversation.params = params
        return "\n".join(
            f"{option.name}={getattr(conversation.params, option.name)}"
            for option in SAMPLING_OPTIONS
        )
    if command == "/help":
        return COMMANDS
    raise UsageError(f"{command} is not a command. /help lists them.")
