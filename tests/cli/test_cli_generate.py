"""`jaxinfer generate`: where prompts come from, what is printed, what the model is asked."""

import io
import json

import pytest

from jaxinfer.cli import main
from jaxinfer.sampling_params import SamplingParams


def generate(*argv: str) -> int:
    return main(["generate", "--model", "m", *argv])


def test_one_prompt_prints_its_answer_and_the_speed(llms, capsys):
    assert generate("--temperature", "0", "a b c") == 0
    captured = capsys.readouterr()
    assert captured.out == "a b c\n"
    assert captured.err.startswith("TTFT 250.0 ms  TPOT 10.0 ms  ")
    assert captured.err.endswith(" tokens/s\n")
    model, call = llms[0].calls
    assert model == ("LLM", "m", {"compile_ahead": True, "max_num_seqs": 1})
    assert call == ("generate", ["a b c"], SamplingParams(temperature=0.0, max_tokens=256))
    assert llms[0].closed


@pytest.mark.parametrize("how", [(), ("--stream",)])
def test_timing_says_where_the_time_to_the_first_token_went(llms, capsys, how):
    assert generate("--timing", *how, "a b") == 0
    parts = capsys.readouterr().err.splitlines()[-1].split(", ")
    assert parts[0].startswith("start-up: import 0.")
    assert parts[1:3] == ["load 2.00 s", "compile 3.25 s (19 programs"]
    assert parts[3:] == ["17 of them from the cache)", "first token 0.25 s"]


def test_a_drawn_answer_comes_with_the_seed_that_repeats_it(llms, capsys):
    generate("a")
    assert capsys.readouterr().err.endswith(" tokens/s  seed 99\n")


def test_stream_prints_the_pieces(llms, capsys):
    assert generate("--stream", "a b c") == 0
    assert capsys.readouterr().out == "a b c\n"
    assert llms[0].calls[1][0] == "stream"
    assert llms[0].cancelled == 0


def test_ctrl_c_stops_the_stream_and_cancels_the_request(llms, capsys):
    assert generate("--stream", "ctrl-c two three four") == 130
    assert capsys.readouterr().out == "ctrl-c two\n"
    assert (llms[0].cancelled, llms[0].closed) == (1, True)


def test_chat_asks_in_messages(llms, capsys):
    assert generate("--chat", "--system", "Be brief.", "--stream", "hi") == 0
    assert generate("--chat", "hi") == 0
    user = {"role": "user", "content": "hi"}
    assert llms[0].calls[1][:2] == (
        "stream_chat",
        [{"role": "system", "content": "Be brief."}, user],
    )
    assert llms[1].calls[1][:2] == ("chat", [[user]])


def test_file_has_a_prompt_per_line_and_json_an_object(llms, tmp_path, capsys):
    path = tmp_path / "prompts.txt"
    path.write_text("erster Satz\n\nzweiter Satz: süß\n", encoding="utf-8")
    assert generate("--file", str(path), "--json", "--max-num-seqs", "4") == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {
        "prompt": "erster Satz",
        "sample": 0,
        "num_prompt_tokens": 2,
        "cached_tokens": 0,
        "token_ids": [0, 1],
        "text": "erster Satz",
        "finish_reason": "stop",
        "seed": 99,
        "metrics": {"ttft_s": 0.25, "tpot_s": 0.01},
    }
    assert second["text"] == "zweiter Satz: süß"
    assert llms[0].calls[0] == ("LLM", "m", {"compile_ahead": True, "max_num_seqs": 4})


def test_json_has_log_probabilities_where_asked_for(llms, capsys):
    """JSON has no number for -inf, so it is null there."""
    token = {"token_id": 5, "logprob": -0.5, "top": {"7": -0.25, "5": -0.5}}
    never = {"token_id": 6, "logprob": None, "top": {"9": 0.0, "0": None}}
    assert generate("--json", "--logprobs", "2", "a b") == 0
    record = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert record["logprobs"] == [token, never]
    assert "prompt_logprobs" not in record
    assert list(record["logprobs"][0]["top"]) == ["7", "5"], "the most likely first"
    assert generate("--json", "--prompt-logprobs", "2", "a b") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["prompt_logprobs"] == [None, token, never]
    assert "logprobs" not in record
    assert [llm.calls[1][2].logprobs for llm in llms] == [2, None]


def test_many_prompts_are_numbered(llms, tmp_path, capsys):
    path = tmp_path / "prompts.txt"
    path.write_text("a b\nc", encoding="utf-8")
    assert generate("--file", str(path)) == 0
    assert capsys.readouterr().out == "[1] a b\na b\n\n[2] c\nc\n\n"
    assert llms[0].calls[0] == ("LLM", "m", {"compile_ahead": True})


def test_samples_are_numbered_behind_their_prompt(llms, capsys):
    assert generate("--n", "2", "a b") == 0
    assert capsys.readouterr().out == "[1.1] a b\na b\n\n[1.2] a b\na b\n\n"
    assert llms[0].calls[0] == ("LLM", "m", {"compile_ahead": True})
    assert generate("--n", "2", "--json", "a b") == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["sample"] for record in records] == [0, 1]


@pytest.mark.parametrize(
    ("argv", "prompts"), [((), ["two\nlines"]), (("--file", "-"), ["two", "lines"])]
)
def test_stdin_is_one_prompt_or_a_file_of_them(llms, monkeypatch, argv, prompts):
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines\n"))
    assert generate(*argv) == 0
    assert llms[0].calls[1][1] == prompts


def test_a_request_that_failed_is_exit_code_1(llms, capsys):
    assert generate("fail") == 1
    assert generate("--stream", "fail") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--file", "x", "hi"), "both a prompt and --file"),
        (("--system", "x", "hi"), "--system needs --chat"),
        (("--stream", "--json", "hi"), "--stream and --json"),
        (("--logit-bias", "1=2", "--logit-bias", "1=3", "hi"), "token id 1 twice"),
        (("--temperature", "-1", "hi"), "SamplingParams.temperature=-1"),
        (("--logprobs", "3", "hi"), "--logprobs needs --json"),
        (("--prompt-logprobs", "0", "hi"), "--prompt-logprobs needs --json"),
        (("--stream", "--n", "2", "hi"), "--n 2 asks for several answers; --stream shows one"),
        (("--json", "--logprobs", "-1", "hi"), "SamplingParams.logprobs=-1"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(llms, capsys, argv, message):
    assert generate(*argv) == 2
    assert message in capsys.readouterr().err
    assert llms == []


def test_stream_takes_one_prompt_and_a_file_holds_at_least_one(llms, tmp_path, capsys):
    path = tmp_path / "prompts.txt"
    path.write_text("a\nb\n", encoding="utf-8")
    assert generate("--stream", "--file", str(path)) == 2
    assert "2 prompts are given" in capsys.readouterr().err
    path.write_text("\n \n", encoding="utf-8")
    assert generate("--file", str(path)) == 2
    assert "holds no prompt" in capsys.readouterr().err
    assert llms == []


def test_a_missing_file_is_an_error_that_names_it(llms, tmp_path, capsys):
    assert generate("--file", str(tmp_path / "none.txt")) == 1
    assert "none.txt" in capsys.readouterr().err
