"""Tiny stand-ins for published models go all the way, with their configs, dtypes and tokenizers.

`published_models.jsonl` holds the configs as they were published, or as a tool saved them again. Of
each a model of two narrow layers is made; some have another family's tokenizer. Oracles: the
tokenizers library and stock Transformers.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from checkpoint.test_tokenizer import ids_in_file, ids_of, with_pad
from dotmoe.common.errors import UserError
from dotmoe.export.config import ExportConfig
from dotmoe.export.write import export
from dotmoe.models.read_config import dense_config
from dotmoe.text.packing import pack
from dotmoe.text.rows import Document
from export.comparison import logits_of, masked_logits, relative_error, stock_logits
from runs import TEXT, loaded, slow_but
from zoo import KINDS, write_tokenizer

FACTS = Path(__file__).with_name("published_models.jsonl")
MODELS = {each["model"]: each for each in map(json.loads, FACTS.read_text().splitlines())}
HEADS, HIDDEN, CONTEXT = 4, 64, 256


QUICK = re.compile(
    "llama-7b-hf|Llama-2-7B-fp16|CodeLlama-7b-hf|Yi-1.5-9B|R1-Distill-Qwen|Nemo|Llama-3.2-1B|"
    "Qwen3-0.6B|Phi-3-mini-4k|Phi-4-mini|OLMo-2-1124-7B-I|SmolLM2-135M-I|Falcon3"
)
"""One or two of each kind; the others are slow."""
UNREAD = "microsoft/Phi-3-mini-128k-instruct (April 2024)"
"""Transformers 5 does not read its RoPE of type `su` without `original_max_position_embeddings`."""


def shrunk(config, rows, special):
    """A published config with two narrow layers; keys stay, and so do relations between sizes."""
    heads, context = config["num_attention_heads"], config.get("max_position_embeddings", 2048)
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    share = heads * head_dim / config["hidden_size"]
    new = {
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": max(1, HEADS * config.get("num_key_value_heads", heads) // heads),
        "head_dim": 16 if share == 1 else 8 if share < 1 else 32,
        "vocab_size": rows,
        "max_position_embeddings": CONTEXT,
        "max_sequence_length": CONTEXT,
        "original_max_position_embeddings": CONTEXT // 4,
        "max_window_layers": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "shared_intermediate_size": 96,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "block_dim": HIDDEN,
        "block_ff_dim": 144,
        "block_multiple_of": 32,
        "conv_dim": HIDDEN,
        "conv_dim_out": HIDDEN,
        "num_heads": HEADS,
        "full_attn_idxs": [1],
    }
    for key in ("layer_types", "no_rope_layers"):
        first, *others = config.get(key) or [None]
        new[key] = [first, next((other for other in others if other != first), first)]
    new = {key: value for key, value in new.items() if config.get(key) is not None}
    if config.get("sliding_window"):
        new["sliding_window"] = max(2, config["sliding_window"] * CONTEXT // context)
    for key in ("rope_scaling", "rope_parameters"):
        if config.get(key):
            new[key] = scaled(config[key], new.get("head_dim", 16), config)
    for key, value in (("bos_token_id", special[0]), ("eos_token_id", special[1])):
        if isinstance(config.get(key), list):
            new[key] = [value, value + 1]
        elif config.get(key) is not None:
            new[key] = value
    if (config.get("pad_token_id") or -1) >= 0:
        beyond = config["pad_token_id"] >= config["vocab_size"]
        new["pad_token_id"] = rows + config["pad_token_id"] - config["vocab_size"] if beyond else 1
    return config | new


def scaled(rope, head_dim, config):
    pairs = int(head_dim * config.get("partial_rotary_factor", 1)) // 2
    short = {key: value[:pairs] for key, value in rope.items() if isinstance(value, list)}
    if "mrope_section" in rope:
        short["mrope_section"] = [2, 1, 1]
    if "original_max_position_embeddings" in rope:
        short["original_max_position_embeddings"] = CONTEXT // 4
    return rope | short


def written(folder, name):
    """Write the stand-in; returns the number of rows of its embedding."""
    facts = MODELS[name]
    kind, config = facts["tokenizer"], facts["config"]
    rows = write_tokenizer(folder, kind)
    parts = json.loads((folder / "tokenizer.json").read_text())
    ids, it = parts["model"]["vocab"], KINDS[kind]
    if facts.get("pad_beyond"):
        with_pad(folder, rows)
    else:
        rows += 6  # published embeddings have spare rows
    config = shrunk(config, rows, [ids[it.bos or it.eos], ids[it.eos]])
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    plain = AutoConfig.from_pretrained(folder)
    if not 0 <= (plain.pad_token_id or 0) < rows:
        plain.pad_token_id = None  # Transformers builds no such model
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(plain, dtype=torch.float32)
    dtype = getattr(torch, config.get("torch_dtype") or config.get("dtype") or "float32")
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for key, weight in model.named_parameters():  # a tied matrix comes once
        noise = torch.randn(weight.shape, generator=generator)
        is_row = weight.dim() == 1
        size = 0.2 if is_row else 0.25 if weight.shape[0] == rows else 1.5 / HIDDEN**0.5
        tensors[key] = (size * noise + (is_row and "norm" in key)).to(dtype)
    if facts.get("inv_freq"):
        for layer in range(2):
            key = f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"
            tensors[key] = 1 / 10000 ** (torch.arange(0, 16, 2) / 16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return rows


STAND_INS = sorted(MODELS.keys() - {UNREAD})


@pytest.mark.parametrize("name", slow_but([*filter(QUICK.search, STAND_INS)], STAND_INS))
def test_a_published_model_goes_all_the_way(name, tmp_path, layout_of):
    rows = written(tmp_path / "dense", name)
    dense = loaded(tmp_path / "dense")
    assert ids_of(dense.tokenizer) == ids_in_file(tmp_path / "dense")
    tokens_BT = pack([Document(TEXT)], dense.tokenizer, 192)[0].long().view(2, 96)
    assert int(tokens_BT.max()) < rows
    layout = layout_of(dense, dtype=torch.bfloat16)
    out = tmp_path / "out"
    record = export(dense, (layout,), out, ExportConfig(), tokens_BT)
    assert record.problems == []
    context = json.loads((out / "config.json").read_text())["max_position_embeddings"]
    tokens_BT = tokens_BT[:, :context]
    reference = masked_logits(dense, layout, tokens_BT)
    assert relative_error(stock_logits(out, tokens_BT), reference) < 8e-3
    if record.active_experts_editable:
        all_on = {record.active_experts_key: layout.num_experts}
        full = stock_logits(out, tokens_BT, **all_on)
        assert relative_error(full, logits_of(dense.model, tokens_BT)) < 8e-3
    again = AutoTokenizer.from_pretrained(out)
    is_told = record.format == "dotmoe" and "does not give the ids" in " ".join(record.notes)
    assert is_told != (ids_of(again) == ids_in_file(tmp_path / "dense"))


def test_a_config_that_transformers_does_not_read_is_refused_in_one_line(tmp_path):
    config = MODELS[UNREAD]["config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"is no valid phi3 config .*original_max_position"):
        dense_config(str(tmp_path))
