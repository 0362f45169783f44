"""The frame around the commands: exit codes, messages, help, a quick start."""

import os
import signal
import subprocess
import sys

import pytest

import jaxinfer
from jaxinfer.cli import COMMANDS, main


def test_no_command_prints_help_and_is_a_usage_error(capsys):
    assert main([]) == 2
    assert "usage: jaxinfer" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["nonsense"], ["generate", "hi"], ["info"], ["fetch", "--x"]])
def test_usage_errors_exit_with_2(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    assert "usage: jaxinfer" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_that_parse(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: jaxinfer {command}" in text
    assert f"\n  jaxinfer {command} " in text


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"jaxinfer {jaxinfer.__version__}\n"


def test_values_out_of_range_are_usage_errors_before_anything_is_loaded(llms, capsys):
    code = main(["generate", "--model", "m", "--top-p", "1.5", "hi"])
    assert code == 2
    assert llms == []
    error = capsys.readouterr().err
    assert error.startswith("jaxinfer generate: error: SamplingParams.top_p=1.5 must be")
    assert "Traceback" not in error


def test_an_error_is_one_line_unless_debug(llms, capsys):
    argv = ["generate", "--model", "m", "refuse"]
    assert main(argv) == 1
    assert capsys.readouterr().err == "jaxinfer generate: error: The prompt is refused.\n"
    assert llms[0].closed
    with pytest.raises(ValueError, match="refused"):
        main([*argv, "--debug"])


def test_an_unforeseen_error_names_its_kind(monkeypatch, capsys):
    def fail(*args, **keywords):
        raise KeyError("embed")

    monkeypatch.setitem(jaxinfer.__dict__, "LLM", fail)
    assert main(["generate", "--model", "m", "hi"]) == 1
    assert "KeyError: 'embed' (--debug shows where)" in capsys.readouterr().err


def test_ctrl_c_exits_with_130(monkeypatch):
    monkeypatch.setitem(
        jaxinfer.__dict__, "LLM", lambda *a, **k: signal.raise_signal(signal.SIGINT)
    )
    assert main(["generate", "--model", "m", "hi"]) == 130


def test_help_imports_neither_jax_nor_tqdm():
    script = (
        "import sys\n"
        "from jaxinfer.cli import main\n"
        "try: main(['info', '--help'])\n"
        "except SystemExit: pass\n"
        "print('loaded', *{'jax', 'flax', 'numpy', 'tqdm'} & set(sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1].strip() == "loaded"


def test_a_reader_that_leaves_ends_the_command_quietly():
    script = (
        "import sys\n"
        "from jaxinfer.cli import generate, main\n"
        "generate.run = lambda args: print('word ' * 100_000)\n"
        "sys.exit(main(['generate', '--model', 'm']))\n"
    )
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", script], stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")
