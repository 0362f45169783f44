"""`jaxinfer info`: what a model is, what its weights and its KV cache take, and what fits."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from jaxinfer.config import DTYPE_BYTES, DTYPES

if TYPE_CHECKING:
    from jaxinfer import ModelConfig

SUMMARY = "show what a model is, what it takes and what fits"

USAGE = "MODEL|NAMED_SHAPE [--memory SIZE]"

EXAMPLES = """\
examples:
  jaxinfer info smollm2-135m
  jaxinfer info path/to/model.gguf --memory 16GiB
  jaxinfer info llama-3-70b --memory 141GB
"""

UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}


def parse_memory(text: str) -> int:
    """Bytes of a size such as 16GiB, 141GB or 1.5e9."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?)\s*([A-Za-z]*)", text)
    units = {unit.lower(): size for unit, size in UNITS.items()}
    if match and match[2].lower() in units:
        size = int(float(match[1]) * units[match[2].lower()])
        if size > 0:
            return size
    raise argparse.ArgumentTypeError(f"{text!r} is not a size. Write it as 16GiB or 141GB.")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what this command takes to `parser`."""
    parser.add_argument(
        "model",
        metavar="MODEL|NAMED_SHAPE",
        help="alias, path or hub id of a fetched model, or a shape such as llama-3-70b",
    )
    parser.add_argument(
        "--memory",
        type=parse_memory,
        metavar="SIZE",
        help="memory to fit into, such as 16GiB (default: this machine's)",
    )


def run(args: argparse.Namespace) -> int:
    """0, once everything is printed."""
    from jaxinfer.models import num_parameters  # noqa: PLC0415  (imports jax)

    config = find_config(args.model)
    memory = args.memory or machine_memory()
    print(args.model)
    for label, text in facts(config, num_parameters(config)):
        print(f"  {label:<13} {text}")
    print()
    for row in fits(config, num_parameters(config), memory):
        print("  {:<9} {:>10} {:>15} {:>18}".format(*row))
    print("  (The buffers of the compiled steps come on top.)")
    return 0


def find_config(model: str) -> ModelConfig:
    """The configuration of a named shape, else that of a checkpoint that is here."""
    from jaxinfer.models import NAMED_SHAPES  # noqa: PLC0415

    if model in NAMED_SHAPES and not Path(model).exists():
        return NAMED_SHAPES[model]
    from jaxinfer.checkpoint import open_checkpoint, resolve  # noqa: PLC0415

    return open_checkpoint(resolve(model)).config


def machine_memory() -> int:
    """Bytes of the first device's memory; on CPU those of the machine."""
    import jax  # noqa: PLC0415

    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def facts(config: ModelConfig, num_parameters: int) -> list[tuple[str, str]]:
    """(label, text) of each thing that a model is."""
    tied = " (embedding and head share theirs)" if config.tie_embeddings else ""
    return [
        ("architecture", config.family),
        ("layers", f"{config.num_layers}"),
        (
            "heads",
            f"{config.num_heads} query, {config.num_kv_heads} key-value, "
            f"{config.head_dim} dimensions each",
        ),
        ("hidden", f"{config.hidden_size:,}, feed-forward {config.intermediate_size:,}"),
        ("vocabulary", f"{config.vocab_size:,}"),
        ("context", f"{config.max_position:,} tokens"),
        ("parameters", f"{num_parameters:,}{tied}"),
    ]


def fits(config: ModelConfig, num_parameters: int, memory: int) -> list[tuple[str, ...]]:
    """A heading, then per dtype: weights, KV per token, tokens that fit beside the weights."""
    rows = [("dtype", "weights", "KV per token", f"fits in {format_bytes(memory)}")]
    for dtype in DTYPES:
        weights = num_parameters * DTYPE_BYTES[dtype]
        per_token = config.kv_bytes_per_token(dtype)
        tokens = (memory - weights) // per_token
        fitting = f"{tokens:,} tokens" if tokens > 0 else "no"
        rows.append((dtype, format_bytes(weights), f"{per_token:,} B", fitting))
    return rows


def format_bytes(size: int) -> str:
    """`size` in the largest binary unit that it reaches, with one decimal."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**power:
            return f"{size / 1024**power:.1f} {unit}"
    return f"{size} B"
