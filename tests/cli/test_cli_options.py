"""The shared options: every sampling field has one, and what was typed is what is passed on."""

import argparse
import dataclasses
import inspect

import pytest

import jaxinfer
from jaxinfer.cli.options import (
    ENGINE_OPTIONS,
    SAMPLING_OPTIONS,
    UsageError,
    add_model_options,
    add_sampling_options,
    engine_keywords,
    parse_setting,
    sampling_params,
)
from jaxinfer.config import EngineConfig
from jaxinfer.engine import outputs
from jaxinfer.sampling_params import SamplingParams


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_model_options(parser)
    add_sampling_options(parser, max_tokens=7)
    return parser.parse_args(["--model", "m", *argv])


def test_every_sampling_field_has_an_option():
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert {option.name for option in SAMPLING_OPTIONS} == fields


def test_engine_options_are_keywords_of_the_model_with_the_defaults_that_help_shows():
    keywords = inspect.signature(jaxinfer.LLM).parameters
    assert keywords.keys() >= engine_keywords(parse()).keys()
    shown = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    shown["max_model_len"] = None  # as much of what is shown as the model can
    shown |= {
        "dtype": "bfloat16",
        "attention": None,
        "parallel": None,
    }  # of the model: not the engine's
    for option in ENGINE_OPTIONS:
        assert keywords[option.name].default == shown[option.name]


def test_a_model_takes_all_that_its_engine_does():
    keywords = inspect.signature(jaxinfer.LLM).parameters
    for field in dataclasses.fields(EngineConfig):
        if field.name != "max_model_len":  # None: what the model can
            assert keywords[field.name].default == field.default, field.name


def test_what_is_on_can_be_turned_off():
    assert engine_keywords(parse("--no-prefix-cache"))["prefix_cache"] is False
    assert engine_keywords(parse("--prefix-cache"))["prefix_cache"] is True


@pytest.mark.parametrize("name", ["RequestOutput", "CompletionOutput", "RequestMetrics"])
def test_the_fakes_have_no_field_that_the_outputs_lack(fakes, name):
    real = dataclasses.fields(getattr(outputs, name))
    fake = dataclasses.fields(fakes[name])
    assert {field.name for field in fake} <= {field.name for field in real}


@pytest.mark.parametrize("name", ["generate", "chat", "stream", "stream_chat"])
def test_the_fake_is_called_as_the_model_is(fakes, name):
    real = list(inspect.signature(getattr(jaxinfer.LLM, name)).parameters)
    fake = list(inspect.signature(getattr(fakes["LLM"], name)).parameters)
    assert fake == real[: len(fake)]


def test_nothing_typed_leaves_every_default():
    assert engine_keywords(parse()) == {"compile_ahead": True}
    assert sampling_params(parse()) == SamplingParams(max_tokens=7)


def test_every_sampling_option_reaches_its_field():
    args = parse(
        *("--temperature", "0.5", "--top-k", "-1", "--top-p", "0.9", "--min-p", "0.05"),
        *("--repetition-penalty", "1.1", "--presence-penalty", "-0.5"),
        *("--frequency-penalty", "0.25", "--logit-bias", "5=-100", "--logit-bias", "6=1.5"),
        *("--allowed-token-ids", "1,2", "--allowed-token-ids", "3", "--bad-words", "darn it"),
        *("--bad-words", "a,b", "--max-tokens", "9", "--min-tokens", "2"),
        *("--stop-token-ids", "4", "--ignore-eos", "--seed", "-3", "--logprobs", "0"),
        *("--prompt-logprobs", "5", "--logprobs-mode", "processed"),
    )
    assert sampling_params(args) == SamplingParams(
        temperature=0.5,
        top_k=-1,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias={5: -100.0, 6: 1.5},
        allowed_token_ids=[1, 2, 3],
        bad_words=["darn it", "a,b"],
        max_tokens=9,
        min_tokens=2,
        stop_token_ids=[4],
        ignore_eos=True,
        seed=-3,
        logprobs=0,
        prompt_logprobs=5,
        logprobs_mode="processed",
    )


def test_every_engine_option_reaches_its_keyword():
    args = parse(
        *("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "4"),
        *("--page-size", "16", "--num-pages", "99", "--attention", "reference"),
        *("--max-logprobs", "40", "--batch-invariant"),
    )
    assert engine_keywords(args) == {
        "compile_ahead": True,
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 4,
        "page_size": 16,
        "num_pages": 99,
        "attention": "reference",
        "max_logprobs": 40,
        "batch_invariant": True,
    }


@pytest.mark.parametrize(
    "argv",
    [
        ("--logit-bias", "5"),
        ("--logit-bias", "x=1"),
        ("--logit-bias", "1=2=3"),
        ("--stop-token-ids", "1,,2"),
        ("--allowed-token-ids", ""),
        ("--dtype", "float8"),
        ("--top-k", "2.5"),
        ("--logprobs", "all"),
        ("--logprobs-mode", "cooked"),
    ],
)
def test_malformed_values_are_refused(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(*argv)
    assert stop.value.code == 2
    assert f"argument {argv[0]}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("temperature=0", ("temperature", 0.0)),
        ("--top-k=5", ("top_k", 5)),
        ("logit_bias=5=-1", ("logit_bias", {5: -1.0})),
        ("stop_token_ids=1,2", ("stop_token_ids", [1, 2])),
        ("ignore_eos=true", ("ignore_eos", True)),
    ],
)
def test_a_setting_is_parsed_as_its_option(text, setting):
    assert parse_setting(text) == setting


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("temperature", "not NAME=VALUE"),
        ("heat=1", "Names: temperature, top_k"),
        ("top_k=x", "top_k=x is not a number"),
        ("ignore_eos=1", "neither true nor false"),
        ("logit_bias=7", "ID=VALUE"),
    ],
)
def test_a_malformed_setting_says_what_is_wanted(text, message):
    with pytest.raises(UsageError, match=message):
        parse_setting(text)


def test_how_many_devices_is_typed_by_axis(capsys):
    keywords = engine_keywords(parse("--parallel", "model=4, data= 2"))
    assert keywords["parallel"] == jaxinfer.ParallelConfig(data=2, model=4)
    for wrong in ("4", "model=0", "model=2,pipe=2", "model=x", "model=2,model=4"):
        with pytest.raises(SystemExit):
            parse("--parallel", wrong)
        assert "data=2,model=3" in capsys.readouterr().err
