"""Writes small random models of each family, and what another library computes with them.

    pip install torch==2.13.0 transformers==5.24.0 safetensors numpy
    python scripts/make_references.py --out FOLDER [--families llama,gemma2]

FOLDER/FAMILY/ gets config.json, model.safetensors (float32) and refs.npz:

    prompt_ids       int32 [40]         random
    logits           float32 [40, 256]  of the prompt
    logits_f64       float64 [40, 256]  the same in float64 (norms, softmax and rope stay float32)
    greedy_ids       int32 [16]         what follows the prompt at temperature 0
    step_logits      float32 [16, 256]  the logits that each of them is the argmax of
    greedy_gaps      float32 [16]       by how much it is
    long_prompt_ids  int32 [100]        random
    long_final_logits  float32 [256]    of its last token

The oracle is transformers on torch, CPU, eager attention, each step computed anew without a cache.
Weights and prompts depend on numpy, the family's seed and their name alone, so a second run gives
the same bytes (the logits do too on the same machine).
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

PROMPT_LEN, LONG_PROMPT_LEN, NUM_STEPS = 40, 100, 16
# Another implementation's float32 error is well below this, so it must find the same greedy ids.
MIN_GAP = 5e-3


@dataclass(frozen=True)
class Row:
    """A random model: transformers' class of its config, and the settings that it gets.

    `zero_centred_norms`: the family's norms multiply by 1 + weight.
    """

    config: str
    seed: int
    settings: dict[str, Any]
    zero_centred_norms: bool = False


def rope(theta: float = 1e4, kind: str = "default", **settings: Any) -> dict[str, Any]:
    """`rope_parameters` of one kind."""
    return {"rope_type": kind, "rope_theta": theta, **settings}


COMMON: dict[str, Any] = dict(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    tie_word_embeddings=False,
    rope_parameters=rope(),
)
GROUPED = dict(num_key_value_heads=2)
TIED = dict(GROUPED, tie_word_embeddings=True)
WINDOW = dict(sliding_window=16)
LLAMA3_ROPE = rope(
    kind="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
# Both prompts are longer than the original length, so the long factors apply.
LONG_ROPE = rope(
    kind="longrope",
    partial_rotary_factor=0.75,
    original_max_position_embeddings=32,
    short_factor=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    long_factor=[1.0, 2.0, 3.0, 4.0, 6.0, 8.0],
)
QUARTER_ROPE = rope(partial_rotary_factor=0.25)
QWEN2_WINDOW = dict(
    GROUPED,
    **WINDOW,
    num_hidden_layers=4,
    intermediate_size=48,
    use_sliding_window=True,
    max_window_layers=2,
    rope_parameters=rope(1e6),
)
GEMMA2 = dict(
    TIED,
    **WINDOW,
    num_hidden_layers=4,
    intermediate_size=48,
    num_attention_heads=8,
    head_dim=16,
    query_pre_attn_scalar=6,
    attn_logit_softcapping=2.0,
    final_logit_softcapping=1.0,
)
GEMMA3 = dict(
    TIED,
    **WINDOW,
    num_hidden_layers=7,
    intermediate_size=24,
    head_dim=16,
    query_pre_attn_scalar=6,
    sliding_window_pattern=3,
    rope_parameters=dict(
        full_attention=rope(1e6, "linear", factor=8.0), sliding_attention=rope(1e4)
    ),
)
SMOLLM3 = dict(
    TIED,
    num_hidden_layers=6,
    intermediate_size=32,
    no_rope_layer_interval=3,
    rope_parameters=rope(2e6),
)
GRANITE = dict(
    TIED,
    embedding_multiplier=3.0,
    residual_multiplier=0.6,
    attention_multiplier=0.6,
    logits_scaling=0.5,
)
STABLELM = dict(GROUPED, rope_parameters=QUARTER_ROPE)

# Each window is shorter than the prompts; each soft-cap and multiplier bites; the layers of gemma
# and smollm3 alternate over at least two periods (gemma3's with a rest); six or eight heads are
# together wider than hidden_size. tests/data/tiny/llama is older: of this kind, but of other random
# numbers, on whose tokens tests count.
FAMILIES: dict[str, Row] = {
    "llama": Row(
        "LlamaConfig",
        100,
        dict(GROUPED, intermediate_size=128, rms_norm_eps=1e-5, rope_parameters=LLAMA3_ROPE),
    ),
    "mistral": Row(
        "MistralConfig", 211, dict(GROUPED, **WINDOW, num_attention_heads=6, head_dim=16)
    ),
    "qwen2": Row("Qwen2Config", 306, dict(TIED, rope_parameters=rope(1e6))),
    "qwen2_window": Row("Qwen2Config", 400, QWEN2_WINDOW),
    "qwen3": Row(
        "Qwen3Config",
        511,
        dict(TIED, num_attention_heads=6, head_dim=16, rope_parameters=rope(1e6)),
    ),
    "gemma2": Row("Gemma2Config", 634, GEMMA2, zero_centred_norms=True),
    "gemma3": Row("Gemma3TextConfig", 713, GEMMA3, zero_centred_norms=True),
    "phi3": Row("Phi3Config", 811, dict(GROUPED, **WINDOW)),
    "phi3_partial": Row(
        "Phi3Config", 901, dict(TIED, rope_parameters=rope(partial_rotary_factor=0.75))
    ),
    "phi3_longrope": Row(
        "Phi3Config",
        1039,
        dict(TIED, original_max_position_embeddings=32, rope_parameters=LONG_ROPE),
    ),
    "olmo2": Row("Olmo2Config", 1108, dict(GROUPED, rope_parameters=rope(5e5))),
    "smollm3": Row("SmolLM3Config", 1220, SMOLLM3),
    "granite": Row("GraniteConfig", 1323, GRANITE),
    "stablelm": Row("StableLmConfig", 1411, dict(STABLELM, use_qkv_bias=True)),
    "stablelm_parallel": Row("StableLmConfig", 1501, dict(STABLELM, use_parallel_residual=True)),
    "gpt_neox": Row(
        "GPTNeoXConfig",
        1605,
        dict(
            intermediate_size=128,
            hidden_act="gelu",
            use_parallel_residual=True,
            rope_parameters=QUARTER_ROPE,
        ),
    ),
}


def generator(row: Row, name: str) -> np.random.Generator:
    """Random numbers of its own for each name, whatever the order in which they are drawn."""
    return np.random.default_rng([row.seed, zlib.crc32(name.encode())])


def tensor(row: Row, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Float32 weights with the name that they have in model.safetensors."""
    noise = generator(row, name).standard_normal(shape, np.float32)
    if len(shape) == 2:
        embedding = name.endswith(("embed_tokens.weight", "embed_in.weight"))
        return noise * np.float32(0.05 if embedding else shape[1] ** -0.5)
    around = 0.0 if row.zero_centred_norms or name.endswith("bias") else 1.0
    return np.float32(around) + np.float32(0.2) * noise


def prompt(row: Row, name: str, length: int) -> np.ndarray:
    """Int32 ids without the special ones."""
    return generator(row, name).integers(3, COMMON["vocab_size"], length, dtype=np.int32)


def write_model(row: Row, folder: Path, transformers: Any) -> None:
    """Lets transformers write config.json and name the tensors, then draws them."""
    config = getattr(transformers, row.config)(**deepcopy(COMMON | row.settings))  # it edits them
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    path = folder / "model.safetensors"
    tensors = {name: tensor(row, name, array.shape) for name, array in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def read_model(folder: Path, torch: Any, transformers: Any) -> Any:
    """The model of a folder, all of whose tensors it used."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    return model.eval()


def results(row: Row, logits_of: Callable[[np.ndarray], np.ndarray]) -> dict[str, np.ndarray]:
    """Everything of refs.npz except the float64 logits."""
    ids = prompt_ids = prompt(row, "prompt_ids", PROMPT_LEN)
    long_prompt_ids = prompt(row, "long_prompt_ids", LONG_PROMPT_LEN)
    steps = []
    for _ in range(NUM_STEPS):
        steps.append(logits_of(ids)[-1])
        ids = np.append(ids, np.int32(steps[-1].argmax()))
    step_logits = np.stack(steps)
    second, first = np.sort(step_logits)[:, -2:].T
    return {
        "prompt_ids": prompt_ids,
        "logits": logits_of(prompt_ids),
        "greedy_ids": ids[PROMPT_LEN:],
        "greedy_gaps": first - second,
        "step_logits": step_logits,
        "long_prompt_ids": long_prompt_ids,
        "long_final_logits": logits_of(long_prompt_ids)[-1],
    }


def make(name: str, out: Path, torch: Any, transformers: Any) -> str:
    """Writes the three files of a family; a line of the printed table.

    Raises ValueError where two tokens are so close that float32 may choose either.
    """
    row, folder = FAMILIES[name], out / name
    folder.mkdir(parents=True, exist_ok=True)
    write_model(row, folder, transformers)
    model = read_model(folder, torch, transformers)

    def logits_of(ids: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return model(torch.from_numpy(ids).long()[None], use_cache=False).logits[0].numpy()

    refs = results(row, logits_of)
    gap = float(refs["greedy_gaps"].min())
    if gap < MIN_GAP:
        raise ValueError(
            f"{name}: seed={row.seed} leaves {gap:.1e} between the first two tokens of a step; "
            f"at least {MIN_GAP} is required. Choose another seed."
        )
    model.double()
    refs["logits_f64"] = logits_of(refs["prompt_ids"])
    np.savez_compressed(folder / "refs.npz", allow_pickle=False, **refs)
    size = sum(path.stat().st_size for path in folder.iterdir())
    count = sum(parameter.numel() for parameter in model.parameters())
    error = abs(refs["logits"] - refs["logits_f64"]).max()
    return (
        f"{name:18} {model.config.num_hidden_layers:6} {count:10} {size:8} {error:9.1e} "
        f"{gap:7.4f} {len(set(refs['greedy_ids'].tolist())):8} {refs['logits'].std():5.2f}"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--families", default=",".join(FAMILIES), metavar="A,B", help="(all)")
    options = parser.parse_args(arguments)
    names = options.families.split(",")
    if unknown := [name for name in names if name not in FAMILIES]:
        parser.error(f"--families: {', '.join(unknown)} unknown. Known: {', '.join(FAMILIES)}.")
    try:
        torch, transformers = import_module("torch"), import_module("transformers")
    except ImportError as error:
        parser.error(
            f"{error.name} is missing, and the references are what torch and transformers compute. "
            "Install both in an environment of their own, as --help says."
        )
    torch.set_num_threads(1)  # sums in one order, whatever the machine
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    print("family             layers parameters    bytes |f32-f64| min gap distinct   std")
    for name in names:
        print(make(name, options.out, torch, transformers))


if __name__ == "__main__":
    main()
