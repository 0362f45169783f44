"""The `jaxinfer` command: parses, runs one command, turns an error into a message and an exit code.

Exit codes: 0 done, 1 error, 2 usage, 130 Ctrl-C. Each command is a module with SUMMARY, USAGE,
EXAMPLES, `add_arguments(parser)` and `run(args) -> exit code`; it imports jax only in `run`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import jaxinfer
from jaxinfer.cli import bench, chat, convert, fetch, generate, info
from jaxinfer.cli.options import UsageError

COMMANDS = {
    "generate": generate,
    "chat": chat,
    "fetch": fetch,
    "convert": convert,
    "info": info,
    "bench": bench,
}

EXAMPLES = """\
examples:
  jaxinfer fetch smollm2-135m
  jaxinfer generate --model smollm2-135m --chat "Why is the sky blue?"
  jaxinfer chat --model smollm2-135m
  jaxinfer info llama-3-70b --memory 141GB

`jaxinfer COMMAND --help` shows what a command takes.
"""


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line, one sub-parser per command."""
    parser = argparse.ArgumentParser(
        prog="jaxinfer",
        description="Run transformer language models with JAX on TPU, GPU and CPU.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"jaxinfer {jaxinfer.__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=command.SUMMARY,
            description=f"{command.SUMMARY[0].upper()}{command.SUMMARY[1:]}.",
            usage=f"jaxinfer {name} {command.USAGE}",
            epilog=command.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_arguments(sub)
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of the command in `argv` (default: that of the process)."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        code = COMMANDS[args.command].run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read stdout has left; nothing may be written to it at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if args.debug:
            raise
        print(f"jaxinfer {args.command}: error: {describe(error)}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1


def describe(error: Exception) -> str:
    """A message for a person: of an error that is written for one its text, else its kind too."""
    # RuntimeError exactly: the runtime's own errors are subclasses of it.
    if isinstance(error, (ValueError, OSError)) or type(error) is RuntimeError:
        return str(error)
    return f"{type(error).__name__}: {error} (--debug shows where)"
