"""What the tests of texts share: a byte tokenizer whose words the script writes, and its folder."""

from __future__ import annotations

import json

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxinfer import SamplingParams
from jaxinfer.checkpoint import save_huggingface
from jaxinfer.text.byte_level import piece_bytes

from .serving import CONFIG, SCRIPT

SPECIAL = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
BOS, IM_END = 1, 4
# What the ids of SCRIPT say, a byte each: the emoji takes four tokens, the umlaut two.
SCRIPT_TEXT = "a🔥 wörld."
CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer():
    """The special tokens, then a token for each byte, those of SCRIPT_TEXT at the ids of SCRIPT."""
    symbol_of = {piece_bytes(s): s for s in pre_tokenizers.ByteLevel.alphabet()}
    scripted = [bytes([byte]) for byte in SCRIPT_TEXT.encode()]
    rest = iter(sorted(set(symbol_of) - set(scripted)))
    ids = dict(zip(SCRIPT, scripted))
    pieces = [ids.get(i) or next(rest) for i in range(len(SPECIAL), len(SPECIAL) + 256)]
    vocab = {token: i for i, token in enumerate(SPECIAL)}
    vocab |= {symbol_of[piece]: i for i, piece in enumerate(pieces, len(SPECIAL))}
    library = tokenizers.Tokenizer(models.BPE(vocab, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(SPECIAL)
    return library.to_str()


def save_model(folder, model, params):
    """Returns None; `folder` has the weights, 1000 rows in the head, and a tokenizer of 261 ids."""
    save_huggingface(folder, model.config, params)
    (folder / "tokenizer.json").write_text(byte_tokenizer(), encoding="utf-8")
    settings = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": True,
        "chat_template": CHATML,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def assert_idle(llm):
    """Nothing is under way in it, and every page is free."""
    assert not llm._engine.has_work
    assert not llm._answers
    llm._engine.check_integrity()
    assert llm._engine.scheduler.shards[0].pool.num_available == CONFIG.num_pages


def sampled(**fields):
    """Parameters that draw, the same at every call."""
    return SamplingParams(**{"max_tokens": 12, "seed": 1, **fields})
