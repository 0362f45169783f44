"""The models under tests/data/tiny are whole and what the script draws; none of it needs torch."""

import json
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

from scripts.make_references import COMMON, FAMILIES, main, prompt, results, tensor

from ..conftest import DATA

TINY = DATA / "tiny"
OTHER_RANDOM_NUMBERS = {"llama"}
REFS = {
    "prompt_ids": ("int32", (40,)),
    "logits": ("float32", (40, 256)),
    "logits_f64": ("float64", (40, 256)),
    "greedy_ids": ("int32", (16,)),
    "step_logits": ("float32", (16, 256)),
    "greedy_gaps": ("float32", (16,)),
    "long_prompt_ids": ("int32", (100,)),
    "long_final_logits": ("float32", (256,)),
}


def settings_of(name):
    return json.loads((TINY / name / "config.json").read_text())


def test_each_folder_has_a_row_and_each_row_a_folder():
    assert {path.name for path in TINY.iterdir()} == set(FAMILIES)
    for name in FAMILIES:
        files = {path.name: path.stat().st_size for path in (TINY / name).iterdir()}
        assert set(files) == {"config.json", "model.safetensors", "refs.npz"}, name
        assert sum(files.values()) < 700_000, name
    assert len({row.seed for row in FAMILIES.values()}) == len(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_config_holds_the_settings_of_the_row(name):
    row, saved = FAMILIES[name], settings_of(name)
    kind = row.config.removesuffix("Config").lower()
    assert saved["model_type"].replace("_", "") == kind
    saved["sliding_window_pattern"] = saved.get("_sliding_window_pattern")
    for key, value in (COMMON | row.settings).items():
        if key == "rope_parameters":
            assert saved[key].items() >= value.items()
        else:
            assert saved[key] == value, key


@pytest.mark.parametrize(
    ("name", "key", "kinds"),
    [
        ("gemma2", "layer_types", "sfsf"),
        ("gemma3", "layer_types", "ssfssfs"),
        ("qwen2_window", "layer_types", "ffss"),
        ("qwen2", "layer_types", "ff"),
        ("smollm3", "no_rope_layers", "110110"),
    ],
)
def test_layers_of_both_kinds_appear(name, key, kinds):
    assert "".join(str(kind)[0] for kind in settings_of(name)[key]) == kinds


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_and_prompts_are_what_the_script_draws(name):
    row, tensors = FAMILIES[name], load_file(TINY / name / "model.safetensors")
    heads = [key for key in tensors if key in ("lm_head.weight", "embed_out.weight")]
    assert len(heads) == (not settings_of(name)["tie_word_embeddings"])
    for key, array in tensors.items():
        assert array.dtype == np.float32 and np.isfinite(array).all(), key
        assert array.std() > 0.03, key
        if name not in OTHER_RANDOM_NUMBERS:
            np.testing.assert_array_equal(array, tensor(row, key, array.shape), key)
    with np.load(TINY / name / "refs.npz") as refs:
        for key, length in (("prompt_ids", 40), ("long_prompt_ids", 100)):
            assert refs[key].min() >= 3 and refs[key].max() < 256
            if name not in OTHER_RANDOM_NUMBERS:
                np.testing.assert_array_equal(refs[key], prompt(row, key, length))


@pytest.mark.parametrize("name", FAMILIES)
def test_refs_agree_with_themselves(name):
    with np.load(TINY / name / "refs.npz") as file:
        refs = dict(file)
    assert {key: (array.dtype.name, array.shape) for key, array in refs.items()} == REFS
    assert all(np.isfinite(array).all() for array in refs.values())
    logits, step_logits, ids = refs["logits"], refs["step_logits"], refs["greedy_ids"]
    assert 0 < abs(logits - refs["logits_f64"]).max() < 5e-6
    np.testing.assert_array_equal(step_logits[0], logits[-1])
    np.testing.assert_array_equal(step_logits.argmax(1), ids)
    others = step_logits.copy()
    others[np.arange(16), ids] = -np.inf
    np.testing.assert_array_equal(refs["greedy_gaps"], step_logits.max(1) - others.max(1))
    assert refs["greedy_gaps"].min() > 1e-3
    # A model that always says the same can't show that it read the right tokens.
    assert len(set(ids.tolist())) > 8
    assert logits.std() > 0.3 and refs["long_final_logits"].std() > 0.3
    if cap := settings_of(name).get("final_logit_softcapping"):
        assert 0.7 * cap < abs(logits).max() < cap


def test_results_of_a_model_that_counts():
    """Its favourite is the last id + 1, by a lead of the number of ids it was given."""

    def logits_of(ids):
        logits = np.zeros((len(ids), 256), np.float32)
        logits[np.arange(len(ids)), (ids + 1) % 256] = len(ids)
        return logits

    refs = results(FAMILIES["llama"], logits_of)
    last = refs["prompt_ids"][-1]
    np.testing.assert_array_equal(refs["greedy_ids"], (last + 1 + np.arange(16)) % 256)
    np.testing.assert_array_equal(refs["greedy_gaps"], 40 + np.arange(16))
    assert refs["long_final_logits"].argmax() == (refs["long_prompt_ids"][-1] + 1) % 256
    assert {key: (array.dtype.name, array.shape) for key, array in refs.items()} == {
        key: value for key, value in REFS.items() if key != "logits_f64"
    }


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_missing_libraries_are_named(missing, monkeypatch, capsys, tmp_path):
    for name in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, None if name == missing else np)
    with pytest.raises(SystemExit) as stopped:
        main(["--out", str(tmp_path)])
    assert stopped.value.code == 2 and f"{missing} is missing" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_unknown_families_are_named(capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path), "--families", "llama,lama,gemma"])
    assert "lama, gemma unknown" in capsys.readouterr().err
