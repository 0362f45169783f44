"""`jaxinfer chat`: history, commands, Ctrl-C."""

import io
import signal

import pytest

from jaxinfer.cli import main
from jaxinfer.cli.chat import COMMANDS


@pytest.fixture
def chat(llms, monkeypatch, capsys):
    """Runs a conversation of `lines`; returns the exit code, the model, stdout and stderr."""

    def run(*lines: str, argv: tuple[str, ...] = ()):
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
        code = main(["chat", "--model", "m", *argv])
        captured = capsys.readouterr()
        return code, llms[-1], captured.out, captured.err

    return run


def says(*contents: str) -> list[dict[str, str]]:
    """User and assistant in turn."""
    return [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)
    ]


def asked(llm) -> list[list[dict[str, str]]]:
    return [call[1] for call in llm.calls if call[0] == "stream_chat"]


def test_history_grows_and_the_end_of_input_leaves(chat):
    code, llm, out, err = chat("hello there", "", "and again")
    assert code == 0
    assert out.startswith("hello there\nand again\n")
    assert asked(llm) == [says("hello there"), says("hello there", "hello there", "and again")]
    assert err.count("tokens/s") == 2
    assert llm.closed
    assert llm.calls[0] == ("LLM", "m", {"compile_ahead": True, "max_num_seqs": 1})


def test_reset_forgets_what_was_said_but_not_the_system_message(chat):
    _, llm, _, _ = chat("one", "/reset", "two", argv=("--system", "Be brief."))
    system = {"role": "system", "content": "Be brief."}
    assert asked(llm) == [[system, *says("one")], [system, *says("two")]]


def test_system_is_set_and_removed(chat):
    _, llm, _, _ = chat("/system Rhyme.", "one", "/system", "two", "/quit", "never read")
    assert asked(llm) == [
        [{"role": "system", "content": "Rhyme."}, *says("one")],
        says("one", "one", "two"),
    ]


def test_params_are_shown_and_set(chat):
    _, llm, out, err = chat("/params top-k=5", "/params", "hi", "/params top_k=many")
    assert out.count("top_k=5\n") == 2
    assert "max_tokens=1024\n" in out
    assert llm.calls[1][2].top_k == 5
    assert "top_k=many is not a number" in err


def test_log_probabilities_are_refused_where_nothing_shows_them(chat):
    _, llm, _, err = chat("/params logprobs=2", "hi")
    assert "--logprobs needs --json of `jaxinfer generate`" in err
    assert llm.calls[1][2].logprobs is None
    assert main(["chat", "--model", "m", "--prompt-logprobs", "1"]) == 2


def test_help_lists_every_command_and_others_are_refused(chat):
    code, _, out, err = chat("/help", "/sing")
    assert code == 0
    assert COMMANDS in out
    assert [line.split()[0] for line in COMMANDS.splitlines() if line.startswith("  /")] == [
        "/reset",
        "/system",
        "/params",
        "/params",
        "/help",
        "/quit",
    ]
    assert "/sing is not a command" in err


def test_ctrl_c_stops_the_answer_and_not_the_program(chat):
    before = signal.getsignal(signal.SIGINT)
    code, llm, out, _ = chat("ctrl-c two three", "next")
    assert code == 0
    assert llm.cancelled == 1
    assert out.startswith("ctrl-c two\nnext\n")
    assert asked(llm)[1] == says("ctrl-c two three", "ctrl-c two", "next")
    assert signal.getsignal(signal.SIGINT) is before


def test_a_refused_message_leaves_no_trace(chat):
    code, llm, _, err = chat("refuse", "next")
    assert code == 0
    assert "error: The prompt is refused." in err
    assert asked(llm)[1] == says("next")
