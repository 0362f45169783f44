"""`jaxinfer generate`: text for one prompt or many."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from jaxinfer.cli.answers import print_answer, speed_line
from jaxinfer.cli.options import (
    UsageError,
    add_model_options,
    add_sampling_options,
    engine_keywords,
    refuse_logprobs,
    refuse_samples,
    sampling_params,
)
from jaxinfer.cli.progress import progress_bars
from jaxinfer.cli.startup import Startup, import_engine

if TYPE_CHECKING:
    from jaxinfer import LLM, RequestOutput, SamplingParams
    from jaxinfer.sched import TokenLogprobs

SUMMARY = "generate text for one prompt or many"

USAGE = "--model MODEL [options] [PROMPT]"

EXAMPLES = """\
examples:
  jaxinfer generate --model smollm2-135m "The capital of France is"
  jaxinfer generate --model smollm2-135m --chat --temperature 0 "Why is the sky blue?"
  jaxinfer generate --model smollm2-135m --file prompts.txt --json > answers.jsonl
  jaxinfer generate --model smollm2-135m --json --logprobs 5 "The capital of France is"
  jaxinfer generate --model smollm2-135m --n 4 "Once upon a time"
  cat letter.txt | jaxinfer generate --model smollm2-135m --max-tokens 64
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what this command takes to `parser`."""
    parser.add_argument("prompt", nargs="?", help="the prompt (default: all of stdin)")
    add_model_options(parser)
    parser.add_argument("--file", metavar="PATH", help="read one prompt per line; - is stdin")
    parser.add_argument(
        "--chat", action="store_true", help="ask each prompt as a user's message to a chat model"
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message, with --chat")
    parser.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="print the text as it comes (default: for one prompt on a terminal)",
    )
    parser.add_argument(
        "--timing", action="store_true", help="say where the time until the first token went"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per answer")
    add_sampling_options(parser, max_tokens=256)


def run(args: argparse.Namespace) -> int:
    """The exit code, once every prompt has its answer on stdout and the speed stands on stderr."""
    params = sampling_params(args)
    if not args.json:
        refuse_logprobs(params)
    keywords = engine_keywords(args)
    if args.system is not None and not args.chat:
        raise UsageError("--system needs --chat: a plain prompt has no system message.")
    prompts = read_prompts(args)
    streaming = wants_stream(args, len(prompts), params)
    if len(prompts) * params.n == 1:  # a row more would cost time at every step
        keywords = {"max_num_seqs": 1, **keywords}
    import_s = import_engine()
    from jaxinfer import LLM  # noqa: PLC0415

    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(progress_bars(sys.stderr))
        llm = stack.enter_context(LLM(args.model, progress=progress, **keywords))
        if streaming:
            code, outputs = stream_one(llm, args, prompts[0], params)
        else:
            code, outputs = generate_all(llm, args, prompts, params)
        if args.timing:
            print(f"start-up: {startup_of(llm, import_s, outputs)}", file=sys.stderr)
        return code


def startup_of(llm: LLM, import_s: float, outputs: list[RequestOutput]) -> Startup:
    """Where the time until the first token of `outputs` went."""
    metrics = llm.metrics()
    first = min((o.metrics.ttft_s for o in outputs if o.metrics.ttft_s is not None), default=None)
    return Startup.of(metrics, import_s=import_s, load_s=metrics["load_s"], first_token_s=first)


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts, from the argument, the file's lines or the whole of stdin; never empty."""
    if args.prompt is not None and args.file is not None:
        raise UsageError("both a prompt and --file are given. Give one of them.")
    if args.prompt is not None:
        return [args.prompt]
    if args.file is None:
        if sys.stdin.isatty():
            raise UsageError("no prompt is given. Type it in quotes, name a --file or pipe it in.")
        text = sys.stdin.read().rstrip("\n")
        if not text:
            raise UsageError("stdin holds no prompt.")
        return [text]
    text = sys.stdin.read() if args.file == "-" else Path(args.file).read_text(encoding="utf-8")
    prompts = [line for line in text.split("\n") if line.strip()]
    if not prompts:
        raise UsageError(f"--file {args.file} holds no prompt. Write one per line.")
    return prompts


def wants_stream(args: argparse.Namespace, num_prompts: int, params: SamplingParams) -> bool:
    """Whether the text is printed as it comes."""
    if args.stream and args.json:
        raise UsageError(
            "--stream and --json exclude each other: an answer's object is printed whole."
        )
    if args.stream and num_prompts > 1:
        raise UsageError(f"--stream prints one answer, and {num_prompts} prompts are given.")
    if args.stream:
        refuse_samples(params, "--stream")
    if args.stream is None:
        return num_prompts * params.n == 1 and not args.json and sys.stdout.isatty()
    return args.stream


def messages_of(args: argparse.Namespace, prompt: str) -> list[dict[str, str]]:
    """The conversation that asks `prompt`."""
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*system, {"role": "user", "content": prompt}]


def stream_one(
    llm: LLM, args: argparse.Namespace, prompt: str, params: SamplingParams
) -> tuple[int, list[RequestOutput]]:
    """The exit code and the output, once the answer to `prompt` has been printed as it came."""
    if args.chat:
        stream = llm.stream_chat(messages_of(args, prompt), params)
    else:
        stream = llm.stream(prompt, params)
    answer = print_answer(stream)
    outputs = [] if answer.last is None else [answer.last]
    if outputs:
        print(closing_line(outputs, answer.seconds, params), file=sys.stderr)
    return 130 if answer.interrupted else exit_code(outputs), outputs


def generate_all(
    llm: LLM, args: argparse.Namespace, prompts: list[str], params: SamplingParams
) -> tuple[int, list[RequestOutput]]:
    """The exit code and the outputs, once the answers to all `prompts` have been printed, in their
    order.
    """
    start = time.perf_counter()
    if args.chat:
        outputs = llm.chat([messages_of(args, prompt) for prompt in prompts], params)
    else:
        outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    for number, (prompt, output) in enumerate(zip(prompts, outputs), 1):
        for sample, answer in enumerate(output.outputs):
            if args.json:
                print(json.dumps(record(prompt, output, sample), ensure_ascii=False))
            elif len(prompts) * params.n == 1:
                print(answer.text)
            else:
                label = f"{number}.{sample + 1}" if params.n > 1 else number
                print(f"[{label}] {prompt}\n{answer.text}\n")
    print(closing_line(outputs, seconds, params), file=sys.stderr)
    return exit_code(outputs), outputs


def record(prompt: str, output: RequestOutput, sample: int) -> dict[str, object]:
    """The JSON object of one answer: ids, text, why it ended, what repeats it, how fast it was;
    log-probabilities if asked for.
    """
    answer = output.outputs[sample]
    fields = {
        "prompt": prompt,
        "sample": sample,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.cached_tokens,
        "token_ids": list(answer.token_ids),
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "seed": output.seed,
        "metrics": dataclasses.asdict(output.metrics),
    }
    found = {"logprobs": answer.logprobs, "prompt_logprobs": output.prompt_logprobs}
    for name, tokens in found.items():
        if tokens is not None:
            fields[name] = [token and token_record(token) for token in tokens]
    return fields


def token_record(token: TokenLogprobs) -> dict[str, object]:
    """The JSON object of one token's log-probabilities; null, where JSON has no number, is -inf."""

    def number(logprob: float) -> float | None:
        return None if logprob == -math.inf else logprob

    top = {token_id: number(logprob) for token_id, logprob in token.top.items()}
    return {"token_id": token.token_id, "logprob": number(token.logprob), "top": top}


def closing_line(outputs: list[RequestOutput], seconds: float, params: SamplingParams) -> str:
    """How fast it was and, for one drawn answer, the seed that repeats it."""
    line = speed_line(outputs, seconds)
    if len(outputs) == 1 and params.temperature > 0:
        line += f"  seed {outputs[0].seed}"
    return line


def exit_code(outputs: list[RequestOutput]) -> int:
    """1 if a request ended in an error, else 0."""
    answers = (answer for output in outputs for answer in output.outputs)
    return int(any(answer.finish_reason == "error" for answer in answers))
