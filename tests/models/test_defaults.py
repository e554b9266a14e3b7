"""Keys of config.json that are missing, null or of no use to the model type mean what they mean in transformers.

defaults.json holds what its configuration classes make of each file; make_defaults.py computes it.
"""

import json
from pathlib import Path

import pytest

from pagedkv.models.architectures import Architecture
from pagedkv.models.errors import ModelError
from pagedkv.models.huggingface import DirectoryConfig
from pagedkv.models.model_types import MODEL_TYPES

TABLE = json.loads(Path(__file__).with_name("defaults.json").read_text())
VARIANTS = [(kind, label) for kind, (_, _, variants) in TABLE.items() for label in variants]
NEEDED = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]


def parsed(path, monkeypatch, config: dict) -> dict:
    (path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(Architecture, "check_tensors", lambda *arguments: None)
    rows = (config["vocab_size"], 128)
    shapes = {"token_embd.weight": rows, "output.weight": rows}
    directory = DirectoryConfig(path)
    if directory.tied:
        del shapes["output.weight"]
    made = directory.model(shapes, False, set())
    names = (
        "rms_eps n_kv_heads head_dim context_length tied attention_scale rope_dim attention_softcap logit_softcap "
        "embedding_scale residual_scale logit_scale n_experts_used expert_shares bos_token_id eos_token_id pad_token_id"
    )
    return {name: getattr(made, name) for name in names.split()} | {
        "windows": list(made.windows),
        "thetas": [rope.theta for rope in made.ropes],
        "rotated": [i is not None for i in made.rope_index],
    }


def test_every_model_type_is_there():
    assert TABLE.keys() == MODEL_TYPES.keys()


@pytest.mark.parametrize(("kind", "label"), VARIANTS, ids=lambda x: x.replace(" ", "-"))
def test_as_transformers(tmp_path, monkeypatch, kind, label):
    whole, values, variants = TABLE[kind]
    changes, missing, differences = variants[label]
    config = {key: value for key, value in whole.items() if key not in missing} | changes
    found = parsed(tmp_path, monkeypatch, {"model_type": kind, **config})
    wanted = values | differences
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key] == value, key


@pytest.mark.parametrize("key", NEEDED)
@pytest.mark.parametrize("kind", TABLE)
def test_keys_without_a_default_are_named(tmp_path, monkeypatch, kind, key):
    config = {k: v for k, v in TABLE[kind][0].items() if k != key}
    if key == "intermediate_size" and kind == "qwen3_moe":
        key = "moe_intermediate_size"
        del config[key]
    with pytest.raises(ModelError, match=f"^{key}: missing$"):
        parsed(tmp_path, monkeypatch, {"model_type": kind, **config})
