"""Exported checkpoints against what the loaders of vLLM and SGLang expect, from a table.

Neither server runs here. The table beside this file says what their sources ask for; whether an
export answers it is decided from its config.json and the headers of its weight files alone.
"""

import json
import re
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from dotmoe.export import FORMATS, ExportConfig, export
from dotmoe.export.server_limits import limits_met as told_limits
from dotmoe.layout import ALWAYS_ON, ExpertLayout
from dotmoe.load import LoadConfig, load_dense

HERE = Path(__file__).parent
TABLE = tomllib.loads((HERE / "loader_expectations.toml").read_text())
GUIDE = HERE.parents[1] / "docs" / "serving.md"
SERVERS = tuple(TABLE["servers"])

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# name: format, family, how the dense model differs, how the layout does, limits it meets
VARIANTS = {
    "glm4_moe": ("glm4_moe", "llama", {}, {}, set()),
    "glm4_moe of tied heads and biases": ("glm4_moe", "qwen2", {"tied": True}, {}, set()),
    "glm4_moe of wide heads and norms": ("glm4_moe", "qwen3", {"head_dim": 32}, {}, set()),
    "glm4_moe of scaled RoPE": ("glm4_moe", "llama", {"rope_parameters": LLAMA3_ROPE}, {}, set()),
    "glm4_moe with dense layers": ("glm4_moe", "llama", {}, {"dense_layers": 1}, set()),
    "glm4_moe, one shared expert": ("glm4_moe", "llama", {}, {"shared": 8}, set()),
    "glm4_moe, two": ("glm4_moe", "llama", {}, {"shared": 16}, {"sglang shared_fusion"}),
    "mixtral": ("mixtral", "llama", {}, {}, set()),
    "mixtral of a window": (
        "mixtral", "mistral", {"sliding_window": 24}, {}, {"sglang sliding_window"}
    ),
    "mixtral of wide heads": ("mixtral", "llama", {"head_dim": 32}, {}, {"sglang head_dim"}),
    "mixtral of scaled RoPE": (
        "mixtral", "llama", {"rope_parameters": LLAMA3_ROPE}, {}, {"sglang rope_scaling"}
    ),
    "qwen2_moe": ("qwen2_moe", "qwen2", {"tied": True}, {}, set()),
    "qwen2_moe, shared expert": ("qwen2_moe", "qwen2", {}, {"shared": 24}, set()),
    "qwen2_moe with dense layers": (
        "qwen2_moe", "qwen2", {}, {"dense_layers": 1}, {"sglang dense_layers"}
    ),
    "qwen3_moe": ("qwen3_moe", "qwen3", {"tied": True, "head_dim": 32}, {}, set()),
    "qwen3_moe of biases": (
        "qwen3_moe", "qwen3", {"attention_bias": True}, {}, {"vllm output_bias"}
    ),
    "qwen3_moe with dense layers": (
        "qwen3_moe", "qwen3", {}, {"dense_layers": 1}, {"sglang dense_layers"}
    ),
    "granitemoe": ("granitemoe", "granite", {"tied": True}, {}, set()),
    "granitemoe, shared expert": ("granitemoe", "granite", {}, {"shared": 24}, set()),
    "granitemoe of biases": (
        "granitemoe", "granite", {"attention_bias": True}, {},
        {"vllm attention_bias", "sglang attention_bias"},
    ),
    "granitemoe of scaled RoPE": (
        "granitemoe", "granite", {"rope_parameters": LLAMA3_ROPE}, {}, {"sglang rope_scaling"}
    ),
    "flex_olmo": ("flex_olmo", "olmo2", {}, {}, set()),
    "flex_olmo of biases": ("flex_olmo", "olmo2", {"attention_bias": True}, {}, set()),
}  # fmt: skip


def random_layout(dense, *, shared=0, dense_layers=0, size=8):
    """Random experts of 8 neurons, 3 of them active."""
    widths = dense.widths
    num_experts = (widths.ffn - shared) // size
    row = torch.cat(
        [torch.full((shared,), ALWAYS_ON), torch.arange(num_experts).repeat_interleave(size)]
    )
    assignment = torch.stack([row[torch.randperm(widths.ffn)] for _ in range(widths.layers)])
    assignment[:dense_layers] = ALWAYS_ON
    router = torch.randn(widths.layers, num_experts, widths.model) * widths.model**-0.5
    return ExpertLayout(
        expert_of_neuron_LN=assignment, router_LED=router.bfloat16().float(), active_experts=3
    )


@pytest.fixture(scope="module")
def exported(tiny_dense, tmp_path_factory):
    """Config and shapes of the tensors of a variant."""
    made = {}

    def make(name):
        if name not in made:
            torch.manual_seed(0)
            target, family, differences, layout, _ = VARIANTS[name]
            model = tiny_dense(family, dtype="bfloat16", **differences)
            dense = load_dense(str(model), LoadConfig(device="cpu", dtype="float32"))
            out = tmp_path_factory.mktemp("exports") / "export"
            config = ExportConfig(format=target, scale_tokens=128, verify_tokens=64)
            tokens_BT = torch.randint(2, 258, (4, 96))
            export(dense, random_layout(dense, **layout), out, config, tokens_BT)
            made[name] = json.loads((out / "config.json").read_text()), shapes_in(out)
        return made[name]

    return make


def shapes_in(folder):
    shapes = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes


def expectation(server, config):
    [found] = [
        entry
        for entry in TABLE["expects"]
        if [entry["server"], [entry["architecture"]]] == [server, config["architectures"]]
    ]
    return found


def evaluate(expression, config, **more):
    return eval(expression, {"__builtins__": {}}, {**config, **more})


def holds(expression, config):
    try:
        return bool(evaluate(expression, config))
    except (NameError, KeyError, TypeError):
        return False


def expected_tensors(entry, config):
    """Name and shape of every tensor that the server's loader has a place for, and misses."""
    sizes = {key: evaluate(rule, config) for key, rule in entry["sizes"].items()}
    sizes |= {"D": config["hidden_size"], "V": config["vocab_size"], "": 1}
    sizes["Q"] = config["num_attention_heads"] * sizes["H"]
    sizes["KV"] = config["num_key_value_heads"] * sizes["H"]
    always = entry["parts"] + [
        part for part, when in entry.get("parts_if", {}).items() if holds(when, config)
    ]
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        is_dense = evaluate(entry.get("is_dense", "False"), config, layer=layer)
        for part in always + entry["dense" if is_dense else "split"]:
            for pattern, shape in TABLE["parts"][part].items():
                name = pattern.replace("*", str(layer))
                for expert in range(sizes["E"] if "#" in name else 1):
                    tensors[name.replace("#", str(expert))] = shape_of(shape, sizes)
    return tensors


def shape_of(text, sizes):
    factors = [re.fullmatch(r"(\d*)([A-Z]*)", word).groups() for word in text.split()]
    return tuple(int(number or 1) * sizes[letters] for number, letters in factors)


def problems(entry, config, shapes):
    """Everything in which a checkpoint differs from what the server expects."""
    found = [f"no {key}" for key in entry["reads"] if config.get(key) is None]
    found += [f"not {need}" for need in entry["needs"] if not holds(need, config)]
    if found:
        return found
    expected = expected_tensors(entry, config)
    found += [f"missing {name}" for name in expected.keys() - shapes.keys()]
    found += [f"stray {name}" for name in shapes.keys() - expected.keys()]
    return found + [
        f"{name} is {shapes[name]}, not {shape}"
        for name, shape in expected.items()
        if shapes.get(name, shape) != shape
    ]


def limits_met(server, config):
    entry = expectation(server, config)
    return {
        f"{server} {limit['id']}"
        for limit in entry.get("limits", [])
        if not holds(limit["holds"], config)
    }


def all_limits():
    return [(entry, limit) for entry in TABLE["expects"] for limit in entry.get("limits", [])]


def test_every_format_is_held_against_the_table():
    formats = {variant[0] for variant in VARIANTS.values()}
    assert formats == {name for name in FORMATS if not name.startswith("gguf")}
    assert formats <= set(VARIANTS), "each format needs a plain variant"


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_server_finds_exactly_what_its_loader_wants_but_for_known_limits(
    variant, server, exported
):
    config, shapes = exported(variant)
    expected = {limit for limit in VARIANTS[variant][4] if limit.startswith(f"{server} ")}
    assert limits_met(server, config) == expected
    if not expected:
        assert problems(expectation(server, config), config, shapes) == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_export_tells_the_limits_that_it_meets(variant, exported):
    config, _ = exported(variant)
    names = {"vllm": "vLLM", "sglang": "SGLang"}
    expected = {
        f"{names[server]}: {limit['says']}"
        for server in SERVERS
        for limit in expectation(server, config).get("limits", [])
        if not holds(limit["holds"], config)
    }
    assert set(told_limits(config)) == expected


def test_every_limit_is_met_by_a_variant():
    met = {limit for variant in VARIANTS for limit in VARIANTS[variant][4]}
    known = {f"{entry['server']} {limit['id']}" for entry, limit in all_limits()}
    assert known == met


def test_the_guide_tells_every_limit_and_what_was_read():
    text = " ".join(GUIDE.read_text().split())
    for entry, limit in all_limits():
        assert limit["says"] in text, f"{entry['server']} {limit['id']}"
    for server in TABLE["servers"].values():
        assert server["version"] in text
        assert any(fact["says"] in text for fact in server["general"] if "--dtype" in fact["says"])
