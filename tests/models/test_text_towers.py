"""Text models inside models of more than text. Oracle: stock Transformers, the whole model."""

import json
import shutil
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from dotmoe.export.config import GgufConfig
from dotmoe.export.write import export
from dotmoe.models.save import begin_checkpoint
from export.comparison import logits_of, masked_logits, relative_error, stock_logits
from runs import in_turn, loaded

VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
VISION |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
PIXTRAL = {"vision_config": VISION | {"model_type": "pixtral"}, "image_token_index": 263}
SIGLIP = {"vision_config": VISION, "image_token_index": 263, "mm_tokens_per_image": 1}
QWEN = {"depth": 1, "num_heads": 2, "hidden_size": 32, "intermediate_size": 48}
QWEN |= {"out_hidden_size": 64, "num_position_embeddings": 16}
WRAPPERS = {
    "mistral3": ("mistral", PIXTRAL),
    "llava": ("llama", PIXTRAL),
    "gemma3": ("gemma3_text", SIGLIP),
    "qwen3_5": ("qwen3_5_text", {"vision_config": QWEN}),
}
"""Wrappers: the text model in each, and the rest of its config."""


@pytest.fixture(scope="module")
def whole(tiny_dense, tmp_path_factory):
    """Writes a tiny model of text and images: its folder and the stock model."""

    def make(kind, *, tied=False, renamed=False):
        folder, (text, rest) = tmp_path_factory.mktemp(kind), WRAPPERS[kind]
        plain = tiny_dense(text, head_dim=32)
        shutil.copytree(plain, folder, dirs_exist_ok=True)
        config = {"text_config": json.loads((plain / "config.json").read_text()), **rest}
        config = AutoConfig.for_model(kind, **config, tie_word_embeddings=tied)
        torch.manual_seed(1)
        model = AutoModelForImageTextToText.from_config(config).eval()
        model.save_pretrained(folder)
        weights = load_file(folder / "model.safetensors")
        if renamed:  # as Transformers 4.5x names them
            weights = {new_name(name): weight for name, weight in weights.items()}
        if kind == "qwen3_5":  # published ones have layers that predict more tokens
            weights["mtp.fc.weight"] = torch.zeros(64, 128)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder, model

    return make


def new_name(name):
    name = name.removeprefix("language_model.")
    if name == "lm_head.weight":
        return name
    is_text = name.startswith("model.")
    return f"model.language_model.{name.removeprefix('model.')}" if is_text else f"model.{name}"


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *in_turn(WRAPPERS, [{}, {"tied": True}]),
        *product([kind for kind in WRAPPERS if kind != "qwen3_5"], [{"renamed": True}]),
    ],
    ids=str,
)
def test_the_text_model_converts_alone(kind, options, whole, layout_of, tokens_BT, tmp_path):
    folder, model = whole(kind, **options)
    dense = loaded(folder, dtype="float32")
    assert dense.config.model_type == model.config.text_config.model_type
    assert dense.config.tie_word_embeddings == options.get("tied", False)
    expected = logits_of(model, tokens_BT)
    torch.testing.assert_close(logits_of(dense.model, tokens_BT), expected)
    layout = layout_of(dense)
    record = export(dense, (layout,), tmp_path / "out", GgufConfig(), tokens_BT)
    held = {"gemma3": "dotmoe", "qwen3_5": "qwen3_5_moe_text"}
    assert record.format == held.get(kind, "glm4_moe")
    others = "mtp, visual" if kind == "qwen3_5" else "multi_modal_projector, vision_tower"
    assert f"Text alone: {others} of the checkpoint are left out." in record.notes
    logits = stock_logits(tmp_path / "out", tokens_BT)
    assert relative_error(logits, masked_logits(dense, layout, tokens_BT)) < 3e-3


def test_a_checkpoint_of_other_weights_holds_the_text_model_alone(whole, tokens_BT, tmp_path):
    folder, model = whole("mistral3")
    dense, out = loaded(folder, dtype="float32"), tmp_path / "to"
    begin_checkpoint(dense, out)
    save_file(dict(dense.model.state_dict()), out / "model.safetensors", metadata={"format": "pt"})
    stock = AutoModelForCausalLM.from_pretrained(out)
    assert json.loads((out / "config.json").read_text())["model_type"] == "mistral"
    torch.testing.assert_close(logits_of(stock, tokens_BT), logits_of(model, tokens_BT))
