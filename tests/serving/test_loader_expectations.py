"""Exported checkpoints against what the loaders of vLLM and SGLang expect, from a table.

Neither server runs here. The table beside this file says what their sources ask for; whether an
export answers it is decided from its config.json and the headers of its weight files alone.
"""

import json
import re
import tomllib
from pathlib import Path

import pytest

from dotmoe.export.architectures import FORMATS
from dotmoe.export.transformers_format import server_faults
from dotmoe.method.granularity import Granularity
from runs import LLAMA3_ROPE, rope, weights_of

HERE = Path(__file__).parent
TABLE = tomllib.loads((HERE / "loader_expectations.toml").read_text())
EXPECTS = [TABLE["usual"] | entry for entry in TABLE["expects"]]
GUIDES = [HERE.parents[1] / "docs" / page for page in ("guides/serve.md", "reference/formats.md")]
NAMES = {"vllm": "vLLM", "sglang": "SGLang"}
BIASED, SHARED, LEADING = {"attention_bias": True}, {"shared_size": 24}, {"dense_layers": 1}

# format, family, how the dense model differs, how the layout does, limits it meets
VARIANTS = [
    ("glm4_moe", "qwen2", {"tied": True}, {}, set()),
    ("glm4_moe", "qwen3", {"head_dim": 32}, {}, set()),
    ("glm4_moe", "llama", LLAMA3_ROPE, {}, set()),
    ("glm4_moe", "llama", {}, LEADING, set()),
    ("glm4_moe", "llama", {}, {"shared_size": 8, "num_experts": 11}, set()),
    ("glm4_moe", "llama", {}, {"shared_size": 16, "num_experts": 10}, {"sglang shared_fusion"}),
    ("mixtral", "llama", {}, {}, set()),
    ("mixtral", "mistral", {"sliding_window": 24}, {}, {"sglang sliding_window"}),
    ("mixtral", "llama", {"head_dim": 32}, {}, {"sglang head_dim"}),
    ("mixtral", "llama", LLAMA3_ROPE, {}, {"sglang rope_scaling"}),
    ("qwen3_moe", "qwen3", {"tied": True, "head_dim": 32}, {}, set()),
    ("qwen3_moe", "qwen3", BIASED, {}, {"vllm output_bias"}),
    ("qwen3_moe", "qwen3", {}, LEADING, {"sglang dense_layers"}),
    ("granitemoe", "granite", {"tied": True}, {}, set()),
    ("granitemoe", "granite", {}, SHARED | {"num_experts": 9}, set()),
    ("granitemoe", "granite", BIASED, {}, {"vllm attention_bias", "sglang attention_bias"}),
    ("granitemoe", "granite", LLAMA3_ROPE, {}, {"sglang rope_scaling"}),
    ("flex_olmo", "olmo2", {}, {}, set()),
    ("flex_olmo", "olmo2", BIASED, {}, set()),
]


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
    optional = entry["parts_if"].items()
    always = entry["parts"] + [part for part, when in optional if holds(when, config)]
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        is_dense = evaluate(entry["is_dense"], config, layer=layer)
        for part in always + entry["dense" if is_dense else "split"]:
            for pattern, shape in TABLE["parts"][part].items():
                name = pattern.replace("*", str(layer))
                factors = [re.fullmatch(r"(\d*)([A-Z]*)", word).groups() for word in shape.split()]
                for expert in range(sizes["E"] if "#" in name else 1):
                    tensors[name.replace("#", str(expert))] = tuple(
                        int(number or 1) * sizes[letters] for number, letters in factors
                    )
    return tensors


def problems(entry, config, shapes):
    """Everything in which a checkpoint differs from what the server expects."""
    found = [f"no {key}" for key in entry["reads"] if config.get(key) is None]
    found += [f"not {need}" for need in entry["needs"] if not holds(need, config)]
    if not found:
        expected = expected_tensors(entry, config)
        found += [f"missing {name}" for name in expected.keys() - shapes.keys()]
        found += [f"stray {name}" for name in shapes.keys() - expected.keys()]
        found += [
            f"{name} is {shapes[name]}, not {shape}"
            for name, shape in expected.items()
            if shapes.get(name, shape) != shape
        ]
    return found


def all_limits():
    return [(entry, limit) for entry in EXPECTS for limit in entry["limits"]]


@pytest.mark.parametrize(
    "variant", VARIANTS, ids=lambda each: "-".join([each[0], *each[2], *each[3]])
)
def test_a_server_finds_exactly_what_its_loader_wants_but_for_limits_that_the_export_tells(
    variant, dense_of, exported
):
    target, family, differences, split, limits = variant
    dense = dense_of(family, dtype="bfloat16", **differences)
    folder = exported(dense, split, format=target, scale_tokens=128, verify_tokens=64).folder
    written = json.loads((folder / "config.json").read_text())
    shapes = {name: tuple(weight.shape) for name, weight in weights_of(folder).items()}
    met, told = set(), set()
    for entry in EXPECTS:
        if [entry["architecture"]] == written["architectures"]:
            beyond = [each for each in entry["limits"] if not holds(each["holds"], written)]
            loads = [limit for limit in beyond if limit["otherwise"] != "kernel"]
            met |= {f"{entry['server']} {limit['id']}" for limit in loads}
            told |= {f"{NAMES[entry['server']]}: {limit['says']}" for limit in beyond}
            if not loads:
                assert problems(entry, written, shapes) == [], entry["server"]
    assert met == limits
    assert {each for each in server_faults(written) if not each.startswith("llama.cpp")} == told


LONGROPE = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LONGROPE = rope("longrope", original_max_position_embeddings=32, **LONGROPE)
DYNAMIC = rope("dynamic", factor=2.0)
YARN = rope("yarn", factor=2.0, attention_factor=1.5)
VERSIONS = {"vllm version", "sglang version"}
KERNELS = [
    ("glm4_moe", "llama", {}, (8, 2, 1024), VERSIONS),
    (
        "glm4_moe",
        "llama",
        LONGROPE,
        (8, 2, 1024),
        VERSIONS | {"vllm longrope", "sglang longrope"},
    ),
    (
        "glm4_moe",
        "llama",
        DYNAMIC,
        (8, 2, 1024),
        VERSIONS | {"vllm dynamic_rope", "sglang dynamic_rope"},
    ),
    ("glm4_moe", "llama", YARN, (8, 2, 1024), VERSIONS | {"sglang attention_factor"}),
    ("glm4_moe", "llama", rope("yarn", factor=2.0), (8, 2, 1024), VERSIONS),
    ("mixtral", "llama", DYNAMIC, (8, 2, 96), {"vllm dynamic_rope", "sglang rope_scaling"}),
    ("qwen3_moe", "qwen3", DYNAMIC, (8, 2, 96), {"vllm dynamic_rope", "sglang dynamic_rope"}),
    ("granitemoe", "granite", DYNAMIC, (8, 2, 96), {"vllm dynamic_rope", "sglang rope_scaling"}),
    (
        "glm4_moe",
        "llama",
        {},
        (40, 2, 128),
        VERSIONS | {"vllm small_experts", "sglang many_active"},
    ),
    ("mixtral", "llama", {}, (40, 32, 96), set()),
    ("mixtral", "llama", {}, (40, 33, 96), {"vllm many_active"}),
    ("qwen3_moe", "qwen3", {}, (40, 33, 96), {"vllm many_active", "sglang many_active"}),
    ("granitemoe", "granite", {}, (40, 33, 96), {"vllm many_active"}),
]
"""Format, family and its options, (E, k, s), and what is told of kernels and versions."""


@pytest.mark.parametrize(("name", "family", "options", "split", "expected"), KERNELS)
def test_what_kernels_need_is_told_of_the_split_at_hand(
    name, family, options, split, expected, dense_of
):
    experts, active, size = split
    granularity = Granularity(num_experts=experts, active_experts=active, expert_size=size)
    written = FORMATS[name].config(dense_of(family, **options), granularity, "bfloat16")
    told = {
        f"{entry['server']} {limit['id']}"
        for entry, limit in all_limits()
        if [entry["architecture"]] == written["architectures"]
        and f"{NAMES.get(entry['server'])}: {limit['says']}" in server_faults(written)
    }
    assert told == expected


def test_every_format_and_every_limit_has_a_variant_and_stands_in_the_guide():
    served = {name for name, each in FORMATS.items() if "vLLM" in each.servers}
    assert {variant[0] for variant in VARIANTS} == served
    known = {f"{entry['server']} {limit['id']}" for entry, limit in all_limits()}
    assert known == {limit for variant in VARIANTS + KERNELS for limit in variant[4]}
    text = " ".join(" ".join(map(Path.read_text, GUIDES)).split())
    for entry, limit in all_limits():
        assert limit["says"] in text, f"{entry['server']} {limit['id']}"
    for server in TABLE["servers"].values():
        assert server["version"] in text
        assert any(fact["says"] in text for fact in server["general"] if "--dtype" in fact["says"])
