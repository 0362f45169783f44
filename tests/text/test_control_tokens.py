"""Control tokens in a text: where they stand, and how they are kept from standing somewhere."""

import subprocess
import sys

import pytest

from jaxinfer.text.control import ControlToken, ControlTokens, looks_like_control

MARK = "\ufdd0"


def _tokens(*texts):
    return ControlTokens(ControlToken(id=n, text=text) for n, text in enumerate(texts))


@pytest.mark.parametrize("text", ["<|User|>", "<｜User｜>", "<s>", "</s>", "<pad>"])
def test_spelled_like_control(text):
    assert looks_like_control(text)


@pytest.mark.parametrize("text", ["<think>", "  ", "õ", "<||>", "<|x", "x|>", "<unk>", "<b>"])
def test_not_spelled_like_control(text):
    assert not looks_like_control(text)


def test_the_longest_token_is_found():
    tokens = _tokens("<|a", "<|a|>", "<|a|>b")
    assert list(tokens.split("x<|a|>b<|a|>c<|a")) == [("x", 2), ("", 1), ("c", 0), ("", None)]
    assert list(tokens.split("plain")) == [("plain", None)]


def test_no_control_tokens():
    tokens = _tokens()
    assert list(tokens.split("a<s>")) == [("a<s>", None)]
    assert tokens.marked("a<s>", MARK) == "a<s>"
    assert tokens.broken("a<s>") == ["a<s>"]


def test_one_character_is_no_control_token():
    assert _tokens("x", "<s>").ids == {1}


def test_breaking_overlapping_tokens():
    tokens = _tokens("<a<b>", "<b>")
    parts = tokens.broken("x<a<b>y<b>")
    assert "".join(parts) == "x<a<b>y<b>"
    assert all(list(tokens.split(part)) == [(part, None)] for part in parts)


def test_marks_stand_only_where_needed():
    tokens = _tokens("<|end|>", "[INST]", "stop")
    for text in ("", "  ", "a < b", "x [1] y", "<i>bold</i>", "tools", "system", "options", "\n"):
        assert tokens.marked(text, MARK) == text
    assert tokens.marked("a<|end|>", MARK) == f"a<{MARK}|end|>"
    assert tokens.marked(" |>  ", MARK) == f" {MARK}|>  "
    assert tokens.marked("a [ ", MARK) == f"a [{MARK} "
    assert tokens.marked("stop", MARK) == f"s{MARK}top"
    assert tokens.marked({"a": ["[INST]", 3, None]}, MARK) == {"a": [f"[{MARK}INST]", 3, None]}


def test_text_needs_no_jax():
    code = "import sys, jaxinfer.text; sys.exit('jax' in sys.modules or 'flax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
