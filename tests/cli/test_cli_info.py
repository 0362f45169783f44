"""`jaxinfer info`: published sizes, and what fits beside the weights."""

import argparse
import json

import pytest
from safetensors.numpy import load_file

from jaxinfer.cli import main
from jaxinfer.cli.info import fits, format_bytes, machine_memory, parse_memory
from jaxinfer.models import NAMED_SHAPES, num_parameters

from ..checkpoint.llama_cpp import write_gguf
from ..conftest import TINY


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GiB", 17_179_869_184),
        ("141GB", 141_000_000_000),
        ("1.5 gib", 1_610_612_736),
        ("80e9", 80_000_000_000),
        ("4096", 4096),
        ("1TiB", 1_099_511_627_776),
    ],
)
def test_memory_sizes(text, size):
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["lots", "16GX", "-1GiB", "1.2.3GiB", "", "0"])
def test_malformed_memory_sizes_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="not a size"):
        parse_memory(text)


@pytest.mark.parametrize(
    ("size", "text"), [(1023, "1023 B"), (1024, "1.0 KiB"), (17_179_869_184, "16.0 GiB")]
)
def test_bytes_are_written_in_binary_units(size, text):
    assert format_bytes(size) == text


def test_info_of_a_shape_has_the_published_numbers(capsys):
    assert main(["info", "llama-3-70b", "--memory", "160GiB"]) == 0
    out = capsys.readouterr().out
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    assert lines["layers"] == ["layers", "80"]
    assert lines["parameters"] == ["parameters", "70,553,706,496"]
    assert "64 query, 8 key-value, 128 dimensions each" in out
    assert lines["bfloat16"][1:5] == ["131.4", "GiB", "327,680", "B"]
    # (160 * 2**30 - 2 * 70_553_706_496) // 327_680
    assert lines["bfloat16"][5:] == ["93,662", "tokens"]
    assert lines["float32"][1:] == ["262.8", "GiB", "655,360", "B", "no"]


def test_what_fits_changes_at_the_last_byte():
    config = NAMED_SHAPES["smollm2-135m"]
    weights = 2 * num_parameters(config)
    assert weights == 2 * 134_515_008
    column = {
        memory: [row[3] for row in fits(config, num_parameters(config), memory)][2]
        for memory in (weights, weights + 23_039, weights + 23_040, weights + 46_080)
    }
    assert list(column.values()) == ["no", "no", "1 tokens", "2 tokens"]


def test_default_memory_is_that_of_this_machine(capsys):
    assert main(["info", "smollm2-135m"]) == 0
    assert f"fits in {format_bytes(machine_memory())}" in capsys.readouterr().out
    assert machine_memory() > 2**28


def test_info_of_a_gguf_file(tmp_path, capsys):
    folder = TINY / "phi3_partial"
    settings = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    path = write_gguf(tmp_path / "model.gguf", settings, tensors)
    assert main(["info", str(path), "--memory", "1MiB"]) == 0
    out = capsys.readouterr().out
    lines = {line.split()[0]: line.split(maxsplit=1)[1:] for line in out.splitlines() if line}
    assert (lines["architecture"], lines["layers"]) == (["phi3"], ["2"])
    assert lines["heads"] == ["4 query, 2 key-value, 16 dimensions each"]
    count = sum(array.size for array in tensors.values())
    assert lines["parameters"][0].startswith(f"{count:,} (embedding and head share")


def test_a_model_that_is_nowhere_is_an_error_that_names_it(capsys):
    assert main(["info", "no-such-model"]) == 1
    assert "no-such-model" in capsys.readouterr().err
