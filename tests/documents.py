"""README.md and docs/ as data: their fenced blocks, and the small model that these are run with."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxinfer import ModelConfig, compute
from jaxinfer.checkpoint import save_huggingface
from jaxinfer.config import RopeConfig

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
# The alias that every page uses. Where a folder of that name lies, it is what is loaded.
NAME = "smollm2-135m"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line of the page before the text."""

    page: Path
    line: int
    language: str
    text: str


@dataclass(frozen=True)
class Command:
    """A command of a console block as it is typed, and what the page says that it prints."""

    line: str
    output: str


def blocks(page: Path, language: str | None = None) -> list[Block]:
    """The fenced blocks of `page`, in order; only those of `language` if it is given."""
    text = page.read_text(encoding="utf-8")
    found = [
        Block(page, text.count("\n", 0, match.start(2)), match[1], match[2])
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    ]
    return [block for block in found if language in (None, block.language)]


def commands(page: Path) -> list[Command]:
    """The commands of the console blocks of `page`, continued lines joined."""
    found = []
    for block in blocks(page, "console"):
        lines = block.text.replace("\\\n", "").splitlines()
        assert lines[0].startswith("$ "), f"{page.name}:{block.line + 1} begins with no command"
        for line in lines:
            if line.startswith("$ "):
                found.append(Command(line.removeprefix("$ "), ""))
            else:
                found[-1] = Command(found[-1].line, f"{found[-1].output}{line}\n")
    return found


def run_python(page: Path) -> dict:
    """The names that the Python blocks of `page` leave behind, run one after another.

    A traceback shows the lines of the page.
    """
    names: dict = {"__name__": page.stem}
    for block in blocks(page, "python"):
        exec(compile("\n" * block.line + block.text, str(page), "exec"), names)
    return names


def write_model(folder: Path) -> None:
    """Writes a random model of two layers, with a tokenizer of bytes and a chat template."""
    config = ModelConfig(
        vocab_size=324,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=24,  # which three devices can split, and four
        num_kv_heads=12,
        head_dim=8,
        rope=RopeConfig(dim=8),
        max_position=2048,
        bos_id=0,
        eos_ids=(1,),
    )
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: rng.normal(0, leaf.shape[-1] ** -0.5, leaf.shape).astype(np.float32),
        jax.eval_shape(compute.Decoder(config).init, jax.random.key(0)),
    )
    save_huggingface(folder, config, params)
    symbols = ["<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    library = tokenizers.Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(symbols[:2])
    library.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
