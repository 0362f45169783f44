"""`jaxinfer fetch`: prints the path of what is there, and says what to do about what is nowhere."""

import pytest

from jaxinfer.checkpoint import ALIASES
from jaxinfer.cli import main


def test_a_model_that_is_there_is_not_fetched_again(tmp_path, monkeypatch, capsys):
    path = tmp_path / "smollm2-135m" / ALIASES["smollm2-135m"].file_name
    path.parent.mkdir()
    path.write_bytes(b"here")
    monkeypatch.chdir(tmp_path.parent)
    assert main(["fetch", "smollm2-135m", "--root", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{path}\n"
    assert captured.err == ""
    assert path.read_bytes() == b"here"


@pytest.mark.parametrize("model", ["smollm3", "weights/model.gguf"])
def test_an_unknown_name_is_an_error_that_lists_the_aliases(model, capsys):
    assert main(["fetch", model]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"jaxinfer fetch: error: {model!r} is no file or folder here")
    assert "smollm2-135m" in error
