"""README.md is true: its Python runs, its commands parse, and what it names is there."""

import functools
import json
import re
import shlex
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxinfer import ModelConfig, compute
from jaxinfer.checkpoint import save_huggingface
from jaxinfer.cli import make_parser
from jaxinfer.config import RopeConfig

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
NAME = "smollm2-135m"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def blocks(language: str) -> list[str]:
    """The fenced blocks of that language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A random model of one layer that takes the README's ids, with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("readme") / "model"
    config = ModelConfig(
        vocab_size=5000,
        hidden_size=32,
        intermediate_size=48,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
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
    return folder


def run(block: str, checkpoint: Path) -> dict:
    """The names that the block leaves behind, run as it stands on the tiny model."""
    assert block.count(f'"{NAME}"') == 1
    names: dict = {}
    exec(compile(block.replace(NAME, str(checkpoint)), "README.md", "exec"), names)
    return names


def test_the_python_blocks_are_those_that_are_tested_here():
    assert [block.count("LLM(") for block in blocks("python")] == [1, 0]


def test_text_in_text_out(checkpoint, capsys):
    names = run(blocks("python")[0], checkpoint)
    answer = names["output"].outputs[0]
    printed = capsys.readouterr().out
    assert answer.text and printed.endswith(answer.text)
    assert len(answer.token_ids) == 64 or answer.finish_reason == "stop"
    # Two answers before it: text (which may hold line ends), reason and TTFT.
    assert len(re.findall(r" (?:length|stop) [\d.e-]+\n", printed[: -len(answer.text)])) == 2


def test_own_jit_equals_generate(checkpoint):
    names = run(blocks("python")[1], checkpoint)
    batch, tokens_BW = names["batch"], np.asarray(names["tokens_BW"])
    generate = jax.jit(functools.partial(compute.generate, names["model"], max_tokens=64))
    prompts = batch.tokens_BT, batch.context_lens_B
    want_BW = generate(names["params"], *prompts, names["sampling"])
    np.testing.assert_array_equal(tokens_BW, want_BW)
    assert tokens_BW.shape == (2, 64) and len(set(tokens_BW[0].tolist())) > 40


def test_commands_parse():
    lines = [line for block in blocks("console") for line in block.splitlines()]
    commands = [line for line in lines if line.startswith("$ jaxinfer ")]
    assert len(commands) >= 5
    for line in commands:
        words = shlex.split(line.split(" > ")[0], comments=True)
        make_parser().parse_args(words[2:])


def test_links_lead_somewhere():
    root = Path(__file__).parents[1]
    paths = re.findall(r"\]\((?!http)([^)#]+)\)", README) + re.findall(r"`(scripts/[^`]+)`", README)
    assert paths and [path for path in paths if not (root / path).exists()] == []
