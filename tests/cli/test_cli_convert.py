"""`jaxinfer convert`, end to end on the tiny Llama."""

import json
import shutil

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import jaxinfer
from jaxinfer.checkpoint import load_params, open_checkpoint
from jaxinfer.cli import main

from ..conftest import DATA


@pytest.fixture
def source(tmp_path):
    """The tiny Llama with a tokenizer of one id for each byte."""
    folder = tmp_path / "source"
    shutil.copytree(DATA / "tiny" / "llama", folder)
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = tokenizers.Tokenizer(models.BPE({s: i for i, s in enumerate(symbols)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    (folder / "tokenizer.json").write_text(library.to_str(), encoding="utf-8")
    return folder


def test_the_converted_model_answers_as_its_source_does(source, tmp_path, capsys):
    target = tmp_path / "target"
    assert main(["convert", str(source), str(target), "--dtype", "float32"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == (f"{target}\n", "")
    params = jaxinfer.SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    answers = []
    for folder in (source, target):
        options = dict(dtype="float32", max_model_len=32, max_num_seqs=1, prefill_chunk=16)
        with jaxinfer.LLM(str(folder), **options) as llm:
            (output,) = llm.generate("hello", params)
            answers.append((output.prompt_token_ids, output.outputs[0].token_ids))
    assert answers[0] == answers[1]
    assert len(answers[0][0]) == 5 and len(answers[0][1]) == 8


def test_the_weights_have_the_dtype_that_is_asked_for(source, tmp_path):
    for argv, dtype in (([], "bfloat16"), (["--dtype", "float16"], "float16")):
        target = tmp_path / dtype
        assert main(["convert", str(source), str(target), *argv]) == 0
        checkpoint = open_checkpoint(target)
        assert {entry.dtype for entry in checkpoint.reader.tensors.values()} == {dtype}
        expected = load_params(open_checkpoint(source), dtype=dtype)
        actual = load_params(checkpoint, dtype=dtype)
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_target_that_is_there_is_refused_before_anything_is_read(tmp_path, capsys):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "notes.txt").write_text("mine")
    assert main(["convert", str(tmp_path / "nothing"), str(tmp_path / "target")]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"jaxinfer convert: error: {tmp_path / 'target'} already exists.")
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_source_that_is_damaged_leaves_no_target(source, tmp_path, capsys):
    settings = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(settings | {"num_hidden_layers": 3}))
    assert main(["convert", str(source), str(tmp_path / "target")]) == 1
    assert "missing model.layers.2.input_layernorm.weight" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
