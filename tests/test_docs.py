"""The pages are true: their blocks run, their commands parse, and the reference misses no name."""

from __future__ import annotations

import doctest
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

import jaxinfer
from jaxinfer import Engine, checkpoint, compute
from jaxinfer.cli import main, make_parser
from jaxinfer.config import RopeConfig
from jaxinfer.engine.outputs import CompletionOutput, RequestMetrics
from jaxinfer.models import NAMED_SHAPES, family_of

from .documents import DOCS, NAME, README, ROOT, Command, blocks, commands, run_python, write_model

PAGES = [README, *DOCS]
API = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
# Of a command that runs the model: small enough to compile in seconds.
SMALL = "--max-model-len 256 --max-num-seqs 1 --prefill-chunk 16 --max-tokens 8 --dtype float32"


def each_page(pages: list[Path]):
    """The mark of a test that takes one page after another."""
    return pytest.mark.parametrize("page", pages, ids=lambda page: page.stem)


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """The current folder: what the pages call smollm2-135m lies in it, and some prompts."""
    write_model(tmp_path / NAME)
    (tmp_path / "prompts.txt").write_text("The capital of France is\n\n2 + 2 =\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@each_page(PAGES)
def test_each_block_is_of_a_kind_that_is_tested(page):
    kinds = {block.language for block in blocks(page)}
    assert kinds <= {"python", "console", ""}  # without a language: what a folder holds


@each_page([page for page in DOCS if blocks(page, "python")])  # the README: in its own test
def test_python_runs(page, place):
    run_python(page)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "count"), [("jax", 4), ("sharding", 6)])
def test_the_steps_run_on_several_devices(page, count, place):
    script = f"from tests.documents import *; run_python(ROOT / 'docs' / '{page}.md')"
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-W", "error", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr


@each_page([page for page in PAGES if commands(page)])
def test_commands(page, place, capsys, monkeypatch):
    for command in commands(page):
        # More than one, and redirections: words that no command takes itself.
        for line in re.split(r"\s*(?:&&|\|)\s*", command.line):
            words = shlex.split(line.removesuffix(" &"), comments=True)
            while "=" in words[0]:  # a variable of the environment
                words = words[1:]
            check_command(words, command, capsys, monkeypatch)


def check_command(words: list[str], command: Command, capsys, monkeypatch) -> None:
    """Raises unless the command `words` is one that works, as far as that can be seen here."""
    match words:
        case ["jaxinfer", *argv]:
            run_jaxinfer(argv, command.output, capsys, monkeypatch)
        case ["make", *targets]:
            makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
            targets = [target for target in targets if "=" not in target]
            assert targets and all(f"\n{target}:" in makefile for target in targets)
        case ["pip" | "uv", *rest] if "install" in rest:
            known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            extras = re.findall(r"\.\[(.*?)\]", " ".join(rest))
            assert set(",".join(extras).split(",")) <= {"", *known["optional-dependencies"]}
        case ["python", script, *options] if script.endswith(".py"):
            source = (ROOT / script).read_text(encoding="utf-8")
            names = [word for word in options if word.startswith("--")]
            assert all(f'"{name}"' in source for name in names), f"{script} takes no {names}"
        case ["python", "-c", script]:
            exec(compile(script, "docs", "exec"), {})
        case ["split", *_]:
            subprocess.run(words, check=True)
        case [program, *_]:
            assert program in ("cd", "gcloud", "git", "nvidia-smi", "uv", "."), words


def run_jaxinfer(argv: list[str], expected: str, capsys, monkeypatch) -> None:
    """Parses a command line, and runs it if its model is here; prints as the page says."""
    argv, target = (argv[: argv.index(">")], argv[-1]) if ">" in argv else (argv, None)
    if argv == ["--version"]:
        return
    args = make_parser().parse_args(argv)
    model = args.source if args.command == "convert" else args.model
    if args.command not in ("generate", "chat", "info", "fetch", "convert"):
        return
    if not Path(model).exists() and model not in NAMED_SHAPES:
        return  # of the hub
    if args.command in ("generate", "chat"):
        argv = [*argv, *SMALL.split()]
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    capsys.readouterr()
    assert main(argv) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    assert printed
    if target:
        Path(target).write_text(printed, encoding="utf-8")
    if expected:
        same = doctest.OutputChecker().check_output(expected, printed, doctest.ELLIPSIS)
        assert same, f"jaxinfer {argv} prints\n{printed}"


@each_page(PAGES)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", text):
        linked = page.parent / target if target else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text("utf-8"), re.MULTILINE)
            assert anchor in [title.lower().replace(" ", "-") for title in headings]
    scripts = re.findall(r"scripts/\w+\.py", text)
    assert [script for script in scripts if not (ROOT / script).exists()] == []


def section(title: str) -> str:
    """The part of api.md below that heading."""
    return re.split(rf"^## {title}$", API, flags=re.MULTILINE)[1].split("\n## ")[0]


def is_named(name: str, text: str) -> bool:
    """Whether `text` has the name in code: alone, qualified, or as an argument."""
    return re.search(rf"`([^`\n]*[\s(.*])?{re.escape(name)}\b[^`\n]*`", text) is not None


def public(thing: type) -> set[str]:
    """The methods and properties of a class that are its users'."""
    return {name for name in vars(thing) if not name.startswith("_")}


def parameters(function) -> list[str]:
    """The names of its arguments, in order."""
    return [name for name in inspect.signature(function).parameters if name != "self"]


def names_of(config: type) -> set[str]:
    return {field.name for field in fields(config)}


REFERENCE = {
    "Python API": set(jaxinfer.__all__),
    "LLM": {*parameters(jaxinfer.LLM), *public(jaxinfer.LLM)},
    "SamplingParams": names_of(jaxinfer.SamplingParams) | {"replace", "check", "stop_ids"},
    "RequestOutput": names_of(jaxinfer.RequestOutput)
    | names_of(CompletionOutput)
    | names_of(RequestMetrics),
    "Engine": {*parameters(Engine), *public(Engine)},
    "EngineConfig": names_of(jaxinfer.EngineConfig) | {"pages_per_seq", "cache"},
    "load": {*parameters(jaxinfer.load), *checkpoint.__all__},
    "CacheConfig": names_of(jaxinfer.CacheConfig),
    "ParallelConfig": names_of(jaxinfer.ParallelConfig) | {"num_devices"},
    "compute": set(compute.__all__),
}


@pytest.mark.parametrize("title", REFERENCE)
def test_the_reference_misses_no_name(title):
    text = API if title == "Python API" else section(title)
    assert [name for name in sorted(REFERENCE[title]) if not is_named(name, text)] == []


@pytest.mark.parametrize("title", ["LLM", "SamplingParams"])
def test_the_reference_tells_the_defaults(title):
    """And names nothing that is not there."""
    rows = dict(re.findall(r"^\| `(\w+)` \| (`.*?`)? ?\|", section(title), re.MULTILINE))
    found = inspect.signature(getattr(jaxinfer, title)).parameters
    defaults = {
        name: "" if p.default is p.empty else f"`{p.default!r}`".replace("'", '"')
        for name, p in found.items()
    }
    assert rows == defaults


@pytest.mark.parametrize(
    ("title", "home"),
    [("LLM", jaxinfer.LLM), ("Engine", Engine), ("load", checkpoint), ("compute", compute)],
)
def test_the_reference_tells_the_arguments(title, home):
    calls = re.findall(r"^\| `(\w+)\((.*?)\)` \|", section(title), re.MULTILINE)
    assert len(calls) >= 4
    for name, listed in calls:
        told = [part.split("=")[0].strip("* ") for part in listed.split(", ") if part != "*"]
        told = [part for part in told if part]
        assert told == parameters(getattr(home, name)), name


def test_the_leaves_of_the_params():
    names = {"V": 7, "D": 6, "F": 5, "N": 4, "K": 2, "G": 2, "H": 8}
    config = jaxinfer.ModelConfig(
        vocab_size=7,
        hidden_size=6,
        intermediate_size=5,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rope=RopeConfig(dim=8),
    )
    text = (ROOT / "docs" / "jax.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.]+)` \| `(\[.*?\])` \|", text, re.MULTILINE)
    told = [(name.replace(".i.", ".0."), tuple(eval(shape, names))) for name, shape in rows]
    leaves = family_of(config).weights(config)
    assert told == [(".".join(map(str, leaf.path)), leaf.shape) for leaf in leaves]
