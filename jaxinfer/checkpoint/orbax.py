"""The native form of a checkpoint: params as Orbax saves them, in a folder with all else a model
needs.

    FOLDER/jaxinfer.json    the ModelConfig, and the size of every other file; written last
    FOLDER/params/          the params tree, each leaf an array of its own (Orbax's PyTree form)
    FOLDER/tokenizer.json   ..., the tokenizer files of the source, or its GGUF metadata

Any number of devices can read it, whatever number wrote it. The sizes show a folder that was cut
short or copied in part; like other formats, it has no checksums of the values.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.checkpoint.config_json import config_from_json, config_to_json
from jaxinfer.checkpoint.fetch import resolve
from jaxinfer.checkpoint.gguf import read_header
from jaxinfer.checkpoint.reader import Reader, TensorSpec, read_json, refuse_overflow
from jaxinfer.config import DTYPE_BYTES, DTYPES, ModelConfig, require
from jaxinfer.models import family_of
from jaxinfer.models.weights import Leaf, LeafPath, leaf_at, unflatten, whole

if TYPE_CHECKING:
    from orbax.checkpoint import Checkpointer

MANIFEST = "jaxinfer.json"
REMEDY = "Convert the model again."
PARAMS = "params"
GGUF_TOKENIZER = "tokenizer_gguf.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    GGUF_TOKENIZER,
)
_VERSION = 2

# Most bytes in one piece of an array on disk. A device reads whole pieces, and those of larger ones
# would span all columns of a matrix, of which it may need an eighth.
_CHUNK_BYTES = 2 << 20
# Leaves are read together up to so many bytes: a call costs about 50 ms, whatever it reads.
_BATCH_BYTES = 256 << 20


class OrbaxReader(Reader[TensorSpec]):
    """A folder that `save_orbax` wrote. `metadata` is what a GGUF source said of its tokenizer."""

    def __init__(self, path: Path):
        self.path = path
        manifest = read_json(path / MANIFEST, REMEDY)
        version = manifest.get("version")
        require(
            version == _VERSION,
            f"{path / MANIFEST} is of version {version}; this program reads {_VERSION}. "
            "Convert the model again.",
        )
        _check_files(path, manifest.get("files"))
        self._settings = manifest.get("config")
        tokenizer = path / GGUF_TOKENIZER
        self.metadata = read_json(tokenizer, REMEDY) if tokenizer.exists() else {}
        self.tensors = _read_specs(path)

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return (path / MANIFEST).is_file() or (path / PARAMS).is_dir()

    def config(self) -> ModelConfig:
        try:
            return config_from_json(self._settings)
        except ValueError as error:
            raise ValueError(
                f"{self.path / MANIFEST}: {error}. Convert the model again."
            ) from error

    def leaves(self, config: ModelConfig) -> tuple[Leaf, ...]:
        return tuple(
            whole(leaf.path, _name(leaf.path), leaf.shape)
            for leaf in family_of(config).weights(config)
        )

    def is_readable(self, dtype: str) -> bool:
        return dtype in DTYPES

    def is_ignored(self, name: str) -> bool:
        return False

    def arrays(
        self,
        leaves: Iterable[Leaf],
        dtype: str,
        shardings: Mapping[LeafPath, jax.sharding.Sharding],
    ) -> Iterator[tuple[Leaf, np.ndarray | jax.Array]]:
        leaves = tuple(leaves)
        with _checkpointer() as checkpointer:
            for batch in _batches(leaves, DTYPE_BYTES[dtype]):
                found = self._restore(checkpointer, leaves, batch, dtype, shardings)
                for leaf in batch:
                    if dtype == "float16":
                        is_finite = bool(jnp.isfinite(found[leaf.path]).all())
                        refuse_overflow(_name(leaf.path), is_finite)
                    yield leaf, found.pop(leaf.path)

    def _restore(
        self,
        checkpointer: Checkpointer,
        leaves: tuple[Leaf, ...],
        batch: tuple[Leaf, ...],
        dtype: str,
        shardings: Mapping[LeafPath, jax.sharding.Sharding],
    ) -> dict[LeafPath, np.ndarray | jax.Array]:
        """The arrays of `batch`, which is some of the saved `leaves`."""
        import orbax.checkpoint as ocp  # noqa: PLC0415 (slow to import)

        def argument(leaf: Leaf) -> ocp.RestoreArgs:
            # Always explicit: what was saved says on which devices, and those may not be here.
            if leaf.path not in shardings:
                return ocp.RestoreArgs(restore_type=np.ndarray, dtype=jnp.dtype(dtype))
            return ocp.ArrayRestoreArgs(
                sharding=shardings[leaf.path], global_shape=leaf.shape, dtype=jnp.dtype(dtype)
            )

        wanted = {leaf.path for leaf in batch}
        item = unflatten({x.path: 0 if x.path in wanted else ocp.PLACEHOLDER for x in leaves})
        arguments = unflatten({leaf.path: argument(leaf) for leaf in leaves})
        try:
            tree = checkpointer.restore(
                (self.path / PARAMS).resolve(),
                args=ocp.args.PyTreeRestore(item=item, restore_args=arguments),
            )
        except (ValueError, KeyError, OSError) as error:
            raise ValueError(
                f"{self.path / PARAMS}: {_name(batch[0].path)} to {_name(batch[-1].path)} cannot "
                f"be read ({error}). Convert the model again."
            ) from error
        return {leaf.path: leaf_at(tree, leaf.path) for leaf in batch}


def require_new(folder: str | Path) -> None:
    """Raises FileExistsError unless `folder` is absent or empty."""
    folder = Path(folder)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise FileExistsError(f"{folder} already exists. Choose another folder, or remove it.")


def save_orbax(
    folder: str | Path,
    config: ModelConfig,
    params: Any,
    tokenizer_source: str | Path | None = None,
) -> None:
    """Writes a folder that `open_checkpoint` and `LLM` read; it appears whole or not at all.

    Args:
        params: arrays, on any devices of this process; weights keep their dtype and their bits.
        tokenizer_source: the checkpoint whose tokenizer travels along, named as for `LLM`. None: no
            tokenizer; the folder serves token ids.

    Raises FileExistsError if `folder` holds something, FileNotFoundError if `tokenizer_source` is
    no checkpoint, and ValueError if the params do not have the shapes of `config` or a dtype that
    is not supported.
    """
    import orbax.checkpoint as ocp  # noqa: PLC0415 (slow to import)

    folder = Path(folder).resolve()
    require_new(folder)
    _check_params(config, params)
    source = None if tokenizer_source is None else resolve(str(tokenizer_source))
    require(
        jax.process_count() == 1,
        f"save_orbax runs in {jax.process_count()} processes. Convert in one.",
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        partial = Path(scratch) / folder.name
        partial.mkdir()
        pieces = {
            leaf.path: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES, shard_axes=_head_axes(leaf.path))
            for leaf in family_of(config).weights(config)
        }
        with _checkpointer() as checkpointer:
            checkpointer.save(
                partial / PARAMS, args=ocp.args.PyTreeSave(params, save_args=unflatten(pieces))
            )
        if source is not None:
            _copy_tokenizer(source, partial)
        files = (file for file in sorted(partial.rglob("*")) if file.is_file())
        sizes = {file.relative_to(partial).as_posix(): file.stat().st_size for file in files}
        manifest = {"version": _VERSION, "config": config_to_json(config), "files": sizes}
        text = json.dumps(manifest, indent=2) + "\n"
        (partial / MANIFEST).write_text(text, encoding="utf-8")
        os.replace(partial, folder)


def _checkpointer() -> Checkpointer:
    """What saves and restores the params tree."""
    import orbax.checkpoint as ocp  # noqa: PLC0415 (slow to import)

    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler())


def _name(path: Iterable[str | int]) -> str:
    return ".".join(map(str, path))


def _head_axes(path: LeafPath) -> tuple[int, ...]:
    """The axis of a leaf's heads, which is cut on disk because it is what devices share out.

    Orbax cuts the other leaves along their longest axes, if they are large.
    """
    return (0,) if path[-2:] == ("qkv", "weight") else ()


def _batches(leaves: Iterable[Leaf], itemsize: int) -> Iterator[tuple[Leaf, ...]]:
    """The leaves in order, cut where the next one would make more than `_BATCH_BYTES`."""
    batch: list[Leaf] = []
    for leaf in leaves:
        if batch and sum(x.size for x in [*batch, leaf]) * itemsize > _BATCH_BYTES:
            yield tuple(batch)
            batch = []
        batch.append(leaf)
    yield tuple(batch)


def _check_files(folder: Path, sizes: Any) -> None:
    """Raises unless every file that the manifest lists is there, with its size."""
    require(
        isinstance(sizes, dict), f"{folder / MANIFEST} lists no files. Convert the model again."
    )
    for name, size in sizes.items():
        file = folder / name
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing. Convert the model again.")
        require(
            file.stat().st_size == size,
            f"{file} has {file.stat().st_size} bytes and must have {size}. "
            "Convert the model again.",
        )


def _read_specs(folder: Path) -> dict[str, TensorSpec]:
    """Every saved array by its dotted path in the params."""
    try:
        with _checkpointer() as checkpointer:
            tree = checkpointer.metadata((folder / PARAMS).resolve()).item_metadata.tree
        entries, _ = jax.tree_util.tree_flatten_with_path(tree)
        return {
            jax.tree_util.keystr(path, simple=True, separator="."): TensorSpec(
                tuple(entry.shape), str(entry.dtype)
            )
            for path, entry in entries
        }
    except Exception as error:  # the library raises errors of many kinds
        raise ValueError(
            f"{folder / PARAMS} cannot be read ({error}). Convert the model again."
        ) from error


def _check_params(config: ModelConfig, params: Any) -> None:
    """Raises ValueError unless `params` are those of `config`, in one supported dtype."""
    leaves = family_of(config).weights(config)
    require(
        jax.tree.structure(params) == jax.tree.structure(unflatten({x.path: 0 for x in leaves})),
        f"The params are not the tree of a {config.family} model with this config. "
        "Give those that load_params made.",
    )
    for leaf in leaves:
        array = leaf_at(params, leaf.path)
        require(
            tuple(array.shape) == leaf.shape,
            f"{_name(leaf.path)} has shape {list(array.shape)}; this config needs "
            f"{list(leaf.shape)}.",
        )
    dtypes = {str(array.dtype) for array in jax.tree.leaves(params)}
    require(
        len(dtypes) == 1 and dtypes <= set(DTYPES),
        f"The params are of dtype {', '.join(sorted(dtypes))}. "
        f"Convert all to one of {', '.join(DTYPES)}.",
    )


def _copy_tokenizer(source: Path, folder: Path) -> None:
    """Puts into `folder` what the tokenizer of `source` is made of."""
    if source.is_dir():
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        return
    metadata, _ = read_header(source)
    kept = {
        key: value
        for key, value in metadata.items()
        if key.startswith("tokenizer.") or key == "general.architecture"
    }
    # ASCII only: a vocabulary may hold lone bytes, which are no valid text.
    (folder / GGUF_TOKENIZER).write_text(json.dumps(kept), encoding="ascii")
