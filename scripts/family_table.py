"""Prints the table of model families, with how far each is from another library's logits.

    python scripts/family_table.py --models tests/data/tiny [--into docs/checkpoints.md]

`--models` holds folders as `scripts/make_references.py` writes them: small models and the float32
logits of 40 prompt tokens. Each is loaded in float32 and run whole; a family's number is the
largest difference over all of its folders. `--into` puts the table between the lines
`<!-- families -->` and `<!-- /families -->` of a Markdown file.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer import CacheConfig, load
from jaxinfer.compute import init_cache
from jaxinfer.models import FAMILIES, Family

BEGIN, END = "<!-- families -->", "<!-- /families -->"


def largest_difference(folder: Path) -> tuple[str, float]:
    """`(family, max |dlogit|)` of the model in `folder` against its refs.npz."""
    model, params = load(folder, dtype="float32")
    with np.load(folder / "refs.npz") as refs:
        ids, want_TV = refs["prompt_ids"], refs["logits"]
    cache = init_cache(model.config, CacheConfig(num_pages=1, page_size=len(ids), dtype="float32"))
    length_B = jnp.array([len(ids)], jnp.int32)
    table_BM = jnp.zeros((1, 1), jnp.int32)
    _, x_BTD = jax.jit(model)(params, cache, ids[None], table_BM, length_B, length_B)
    logits_TV = model.unembed(params, x_BTD[0])
    return model.config.family, float(np.abs(np.asarray(logits_TV) - want_TV).max())


def table(measured: Mapping[str, float]) -> str:
    """The families in Markdown, a row each; `measured` is the difference by name."""
    lines = [
        "| family | `model_type` | GGUF architecture | what it is | max \\|dlogit\\| |",
        "| --- | --- | --- | --- | ---: |",
    ]
    for family in FAMILIES:
        cells = (
            family.name,
            _code(family.model_types),
            _code(family.gguf_architectures),
            _what(family),
            f"{measured[family.name]:.1e}" if family.name in measured else "not measured",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _code(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "-"


def _what(family: Family) -> str:
    """The first sentence of the family's file."""
    module = inspect.getmodule(family.config_from_hf)
    assert module is not None and module.__doc__ is not None
    sentence = module.__doc__.split(".\n")[0].removeprefix("The ").rstrip(".")
    return " ".join(sentence.split())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", type=Path, required=True, help="folder of reference models")
    parser.add_argument("--into", type=Path, help="Markdown file whose table to replace")
    arguments = parser.parse_args()
    measured: dict[str, float] = {}
    for refs in sorted(arguments.models.glob("*/refs.npz")):
        family, difference = largest_difference(refs.parent)
        measured[family] = max(difference, measured.get(family, 0.0))
    if arguments.into is None:
        print(table(measured))
        return
    text = arguments.into.read_text("utf-8")
    pattern = re.compile(f"(?<={BEGIN}\n).*?(?={END})", re.DOTALL)
    if not pattern.search(text):
        parser.error(f"{arguments.into} lacks the lines {BEGIN} and {END}. Add them.")
    text = pattern.sub(lambda _: f"\n{table(measured)}\n\n", text)
    arguments.into.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
