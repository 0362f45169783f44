"""The public names: all there, each from the part that owns it, none before it is asked for."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import jaxinfer


@pytest.mark.parametrize("name", jaxinfer.__all__)
def test_each_public_name_is_there(name):
    assert getattr(jaxinfer, name) is not None
    assert name in dir(jaxinfer)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'jaxinfer' has no attribute 'Llama'"):
        _ = jaxinfer.Llama


def test_the_version_is_that_of_the_package():
    pyproject = Path(__file__).parents[1] / "pyproject.toml"
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    assert jaxinfer.__version__ == project["version"]


def loaded_after(statement: str) -> set[str]:
    """Which of jax and flax a fresh process has loaded after `statement`."""
    script = f"import sys\n{statement}\nprint(*{{'jax', 'flax'}} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import jaxinfer",
        "import jaxinfer; jaxinfer.SamplingParams(); jaxinfer.EngineConfig()",
        "import jaxinfer.text, jaxinfer.sched",
    ],
)
def test_host_parts_load_no_jax(statement):
    assert loaded_after(statement) == set()
