"""What llama.cpp makes of a Hugging Face folder, by rules of our own telling.

Names of tensors are those of the gguf package. Of rules there are: keys of each architecture, the
order of rows that rotate, norms that hold 1 + weight, tensors that are settings.
"""

import math

import gguf
import numpy as np

ARCHITECTURES = {
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "gpt_neox": gguf.MODEL_ARCH.GPTNEOX,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "stablelm": gguf.MODEL_ARCH.STABLELM,
}
PERMUTED = ("granite", "llama", "mistral", "smollm3")


def write_gguf(path, settings, tensors, *, quantise=None, extra=(), changes=None):
    """`path`, written: the model of config.json's `settings` and its `tensors` by name.

    Args:
        quantise: the type of matrices whose rows are whole blocks of it.
        extra: (name, array) of more tensors of the file.
        changes: keys of the architecture to be set, or with None left out.
    """
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[settings["model_type"]]])
    for key, value in {**keys(settings), **(changes or {})}.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add |= {str: writer.add_string, list: writer.add_array}
        if value is not None:
            add[type(value)](f"{writer.arch}.{key}", value)
    writer.add_token_list([f"token {i}".encode() for i in range(settings["vocab_size"])])
    if settings["bos_token_id"] is not None:
        writer.add_bos_token_id(settings["bos_token_id"])
    for add_id, i in zip((writer.add_eos_token_id, writer.add_eot_token_id), ends(settings)):
        add_id(i)
    for name, array in [*converted(settings, tensors), *extra]:
        if quantise is not None and array.ndim == 2 and array.shape[1] % 32 == 0:
            writer.add_tensor(name, gguf.quantize(array, quantise), raw_dtype=quantise)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def ends(settings):
    """The ids that end a text."""
    ids = settings["eos_token_id"]
    return ids if isinstance(ids, list) else [ids]


def head_dim_of(settings):
    equal = settings["hidden_size"] // settings["num_attention_heads"]
    return settings.get("head_dim") or equal


def rotating(settings):
    """How many dimensions of a head rotate."""
    rope = settings["rope_parameters"]
    return int(head_dim_of(settings) * rope.get("partial_rotary_factor", 1.0))


def keys(settings):
    """The metadata of the architecture, without its name before each key."""
    family, rope = settings["model_type"], settings["rope_parameters"]
    heads = settings["num_attention_heads"]
    result = {
        "context_length": settings["max_position_embeddings"],
        "embedding_length": settings["hidden_size"],
        "feed_forward_length": settings["intermediate_size"],
        "block_count": settings["num_hidden_layers"],
        "attention.head_count": heads,
    }
    if "num_key_value_heads" in settings:
        result["attention.head_count_kv"] = settings["num_key_value_heads"]
    if "rms_norm_eps" in settings:
        result["attention.layer_norm_rms_epsilon"] = settings["rms_norm_eps"]
    if "layer_norm_eps" in settings:
        result["attention.layer_norm_epsilon"] = settings["layer_norm_eps"]
    if settings.get("head_dim") and family != "granite":
        result |= {f"attention.{x}_length": settings["head_dim"] for x in ("key", "value")}
    if family in ("gpt_neox", "phi3", "stablelm", *PERMUTED):
        result["rope.dimension_count"] = rotating(settings)
    full_rope = rope.get("full_attention", rope)
    if family not in ("gemma2", "gpt_neox", "stablelm"):  # 10000 is what a missing key says
        result["rope.freq_base"] = full_rope["rope_theta"]
    if full_rope["rope_type"] in ("linear", "yarn"):
        result["rope.scaling.type"] = full_rope["rope_type"]
        result["rope.scaling.factor"] = full_rope["factor"]
    return result | own_keys(settings, rope)


def own_keys(settings, rope):
    """What one architecture alone has."""
    match settings["model_type"]:
        case "gemma2":
            caps = ("attn_logit_softcapping", "final_logit_softcapping")
            window = {"attention.sliding_window": settings["sliding_window"]}
            return window | {name: settings[name] for name in caps}
        case "gemma3_text":
            return {"attention.sliding_window": settings["sliding_window"]}
        case "granite":
            return {
                "attention.scale": settings["attention_multiplier"],
                "embedding_scale": settings["embedding_multiplier"],
                "residual_scale": settings["residual_multiplier"],
                "logit_scale": settings["logits_scaling"],
            }
        case "phi3":
            old = settings.get("original_max_position_embeddings", 4096)
            own = {
                "attention.sliding_window": settings.get("sliding_window") or 0,
                "rope.scaling.original_context_length": old,
            }
            if rope["rope_type"] == "longrope":
                longer = settings["max_position_embeddings"] / old
                own["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(longer) / math.log(old))
            return own
        case "gpt_neox" | "stablelm":
            return {"use_parallel_residual": settings["use_parallel_residual"]}
    return {}


def converted(settings, tensors):
    """(name, array) of each tensor of the file."""
    family, rope = settings["model_type"], settings["rope_parameters"]
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], settings["num_hidden_layers"])
    heads = {"q_proj": settings["num_attention_heads"]}
    heads["k_proj"] = settings.get("num_key_value_heads")
    for name, original in tensors.items():
        array, module = original, name.split(".")[-2]
        if family in PERMUTED and module in heads:
            array = permute(array, heads[module])
        if module == "query_key_value":
            array = by_projection(array, settings["num_attention_heads"])
        if family.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        yield names.get_name(name, try_suffixes=(".weight", ".bias")), array
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", llama3_divisors(rope, rotating(settings))
    if rope.get("rope_type") == "longrope":
        for kind in ("long", "short"):
            yield f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32)


def permute(array, num_heads):
    """Rows of each head from two halves to pairs."""
    halves = array.reshape(num_heads, 2, -1, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def by_projection(array, num_heads):
    """Rows of query, key and value of one head after another, to all queries, keys, values."""
    rows = array.reshape(num_heads, 3, -1, *array.shape[1:])
    return rows.swapaxes(0, 1).reshape(array.shape)


def llama3_divisors(rope, dim):
    """The published formula of Llama 3.1 worked out for each frequency."""
    wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    old, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = (old / wavelengths - low) / (high - low)
    blended = 1 / ((1 - kept) / factor + kept)
    long, short = wavelengths > old / low, wavelengths < old / high
    return np.where(long, factor, np.where(short, 1.0, blended)).astype(np.float32)
