"""The options that commands share: a row per keyword of `LLM` and field of `SamplingParams`.

An option is `--` and the keyword in kebab-case. Only what was typed is passed on, so that each
default stands in one place: `EngineConfig` or `SamplingParams`. Nothing here imports jax.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxinfer.config import DTYPES, EngineConfig, ParallelConfig, require
from jaxinfer.sampling_params import LOGPROBS_MODES, SamplingParams


class UsageError(ValueError):
    """What was typed cannot be meant: the process ends with exit code 2."""


@dataclass(frozen=True)
class Option:
    """One row: `parse` makes a value of the typed text; when it `repeats`, a list that grows.

    A flag has no `parse`. `join` makes the keyword's value of a grown list.
    """

    name: str
    parse: Callable[[str], Any] | None
    help: str
    metavar: str = "N"
    choices: tuple[str, ...] | None = None
    repeats: bool = False
    join: Callable[[list], Any] = list

    @property
    def flag(self) -> str:
        """The option as it is typed."""
        return "--" + self.name.replace("_", "-")


def parse_ids(text: str) -> list[int]:
    """Token ids of a comma-separated list."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of token ids. Write them as 1,2,3."
        ) from None


def parse_bias(text: str) -> list[tuple[int, float]]:
    """The one (token id, bias) pair of ID=VALUE."""
    try:
        token_id, bias = text.split("=")
        return [(int(token_id), float(bias))]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a token id and a number. Write it as ID=VALUE, such as 42=-5."
        ) from None


def parse_word(text: str) -> list[str]:
    """The one word, exactly as typed."""
    return [text]


def join_biases(pairs: Sequence[tuple[int, float]]) -> dict[int, float]:
    """Token id -> bias; an id that was given twice raises UsageError."""
    biases = dict(pairs)
    if len(biases) != len(pairs):
        twice = next(i for i in biases if [token_id for token_id, _ in pairs].count(i) > 1)
        raise UsageError(f"--logit-bias names token id {twice} twice. Give each id one bias.")
    return biases


def parse_parallel(text: str) -> ParallelConfig:
    """The devices of data=N,model=N, either or both."""
    try:
        pairs = [part.split("=") for part in text.split(",")]
        counts = {name.strip(): int(count) for name, count in pairs}
        require(len(counts) == len(pairs) and counts.keys() <= {"data", "model"}, text)
        return ParallelConfig(**counts)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} does not say how many devices. Write it as data=2,model=3, either or both, "
            "each at least 1."
        ) from None


ENGINE_OPTIONS = (
    Option("dtype", str, "type of the weights (default: bfloat16)", choices=DTYPES),
    Option("kv_dtype", str, "type of the KV cache (default: that of the weights)", choices=DTYPES),
    Option(
        "max_model_len", int, "most tokens, prompt and output, of one request, if the model can"
    ),
    Option("max_num_seqs", int, "most requests that decode together; 1 for a single prompt"),
    Option("page_size", int, "tokens in a page of the KV cache"),
    Option("num_pages", int, "pages in the KV cache (default: enough for every row)"),
    Option("prefill_chunk", int, "most prompt tokens computed at once"),
    Option("token_budget", int, "most tokens of a step, decoding first (default: no limit)"),
    Option("prefix_cache", None, "requests share the keys and values of equal beginnings"),
    Option("max_window", int, "most decode steps between two looks of the host"),
    Option("max_logprobs", int, "most likely tokens that --logprobs may ask for"),
    Option(
        "parallel",
        parse_parallel,
        "spread the model over devices, such as data=2,model=3 (default: one)",
        metavar="AXIS=N,...",
    ),
    Option("attention", str, "attention backend (default: by platform)", metavar="NAME"),
    Option("batch_invariant", None, "the same bits whatever else is computed; on CPU, and slower"),
)

SAMPLING_OPTIONS = (
    Option("temperature", float, "divides the logits; 0 takes the most likely token", metavar="X"),
    Option("top_k", int, "sample among the N most likely tokens; 0 or -1: all"),
    Option("top_p", float, "sample in the smallest set with probability X; 1: all", metavar="X"),
    Option("min_p", float, "drop tokens below X times the most likely one", metavar="X"),
    Option("repetition_penalty", float, "divide logits of tokens seen so far; 1: off", metavar="X"),
    Option("presence_penalty", float, "subtract from tokens of the output, once", metavar="X"),
    Option("frequency_penalty", float, "subtract from them once per occurrence", metavar="X"),
    Option(
        "logit_bias",
        parse_bias,
        "add VALUE to the logit of token ID; may be repeated",
        metavar="ID=VALUE",
        repeats=True,
        join=join_biases,
    ),
    Option("allowed_token_ids", parse_ids, "sample only these", metavar="ID,...", repeats=True),
    Option("bad_words", parse_word, "never write WORD; may be repeated", "WORD", repeats=True),
    Option("max_tokens", int, "most tokens to generate"),
    Option("min_tokens", int, "tokens to generate before one may end the answer"),
    Option(
        "stop", parse_word, "end the text before STRING; may be repeated", "STRING", repeats=True
    ),
    Option("stop_token_ids", parse_ids, "end the answer at these too", "ID,...", repeats=True),
    Option("ignore_eos", None, "go on past the model's own end of text"),
    Option("seed", int, "makes sampling repeatable (default: a fresh one, reported)"),
    Option("n", int, "answers to each prompt, each drawn by itself"),
    Option("logprobs", int, "log-probabilities of each token and the N most likely; with --json"),
    Option("prompt_logprobs", int, "the same of each token of the prompt; with --json"),
    Option(
        "logprobs_mode",
        str,
        "of the model's own logits, or of what is sampled from",
        choices=LOGPROBS_MODES,
    ),
)


def add_options(
    parser: argparse.ArgumentParser, title: str, options: Sequence[Option], defaults: Mapping
) -> None:
    """Adds a group of options to `parser`; what is not typed leaves no attribute behind."""
    group = parser.add_argument_group(title)
    for option in options:
        default = defaults.get(option.name)
        text = option.help if default is None else f"{option.help} (default: {default})"
        if option.parse is None:
            group.add_argument(
                option.flag,
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=option.help if not default else f"{option.help} (default: yes)",
            )
        else:
            group.add_argument(
                option.flag,
                type=option.parse,
                action="extend" if option.repeats else "store",
                default=argparse.SUPPRESS,
                choices=option.choices,
                metavar=None if option.choices else option.metavar,
                help=text,
            )


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds --model and the options of the engine."""
    parser.add_argument(
        "--model",
        required=True,
        metavar="MODEL",
        help="alias (smollm2-135m), path (GGUF file or Hugging Face folder) or hub id",
    )
    defaults = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    add_options(parser, "engine", ENGINE_OPTIONS, defaults)


def add_sampling_options(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Adds the options of sampling; `max_tokens` is the command's own default."""
    defaults = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    add_options(parser, "sampling", SAMPLING_OPTIONS, defaults | {"max_tokens": max_tokens})
    parser.set_defaults(max_tokens=max_tokens)


def given(args: argparse.Namespace, options: Sequence[Option]) -> dict[str, Any]:
    """Keyword -> value of each of `options` that was typed."""
    typed = {}
    for option in options:
        if hasattr(args, option.name):
            value = getattr(args, option.name)
            typed[option.name] = option.join(value) if option.repeats else value
    return typed


def engine_keywords(args: argparse.Namespace) -> dict[str, Any]:
    """Keywords for `LLM`: what was typed. All is compiled ahead, so that no answer waits for it."""
    return {"compile_ahead": True, **given(args, ENGINE_OPTIONS)}


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The typed sampling parameters; values out of range raise UsageError."""
    try:
        return SamplingParams(**given(args, SAMPLING_OPTIONS))
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error


def refuse_samples(params: SamplingParams, where: str) -> None:
    """Raises UsageError if `params` ask for several answers; `where` they would not be seen."""
    if params.n > 1:
        raise UsageError(f"--n {params.n} asks for several answers; {where} shows one.")


def refuse_logprobs(params: SamplingParams) -> None:
    """Raises UsageError if `params` ask for log-probabilities; for where they would not be seen."""
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None:
            raise UsageError(
                f"--{name.replace('_', '-')} needs --json of `jaxinfer generate`, which alone "
                "shows log-probabilities."
            )


def parse_setting(text: str) -> tuple[str, Any]:
    """(field, value) of NAME=VALUE, where NAME is that of a sampling option."""
    name, equals, value = text.partition("=")
    options = {option.name: option for option in SAMPLING_OPTIONS}
    option = options.get(name.strip().removeprefix("--").replace("-", "_"))
    if option is None or not equals:
        raise UsageError(f"{text!r} is not NAME=VALUE. Names: {', '.join(options)}.")
    if option.parse is None:
        if value not in ("true", "false"):
            raise UsageError(f"{option.name}={value} is neither true nor false.")
        return option.name, value == "true"
    try:
        parsed = option.parse(value)
    except argparse.ArgumentTypeError as error:
        raise UsageError(str(error)) from error
    except ValueError:
        raise UsageError(f"{option.name}={value} is not a number.") from None
    return option.name, option.join(parsed) if option.repeats else parsed
