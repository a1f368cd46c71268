"""Every family through every architecture that can hold it, verified against the masked model."""

import json
import subprocess
import sys

import pytest
import torch

from dotmoe.errors import UserError
from dotmoe.export import OUTPUTS, ExportConfig, export
from dotmoe.layout import ALWAYS_ON, ExpertLayout
from dotmoe.models.family import FAMILIES
from dotmoe.moe.surgery import masked_by

TARGETS = {
    "llama": ("glm4_moe", "mixtral", "granitemoe"),
    "mistral": ("glm4_moe", "mixtral", "granitemoe"),
    "phi3": ("glm4_moe", "mixtral", "granitemoe"),
    "qwen2": ("glm4_moe", "qwen2_moe"),
    "qwen3": ("glm4_moe", "qwen3_moe"),
    "granite": ("granitemoe",),
    "olmo2": ("flex_olmo",),
}
"""Formats that can hold a plain model of each family, the default first."""
GRANITE_FACTORS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}
CASES = [
    (family, target, dtype)
    for family, targets in TARGETS.items()
    for target in targets
    for dtype in ("float32", "bfloat16")
]


def settings(family):
    return GRANITE_FACTORS if family == "granite" else {}


def with_always_on(layout, *, shared=24, dense_layers=0, num_experts=12):
    """The same layout with some neurons of each layer, or all of the first layers', always on."""
    size = (layout.num_neurons - shared) // num_experts
    experts = torch.arange(num_experts).repeat_interleave(size)
    assignment = layout.expert_of_neuron_LN.clone()
    for layer in range(layout.num_layers):
        row = torch.cat([torch.full((shared,), ALWAYS_ON), experts])
        assignment[layer] = row[torch.randperm(layout.num_neurons)]
    assignment[:dense_layers] = ALWAYS_ON
    return ExpertLayout(
        expert_of_neuron_LN=assignment,
        router_LED=layout.router_LED,
        active_experts=layout.active_experts,
    )


def test_every_family_has_its_formats_here():
    assert set(TARGETS) == set(FAMILIES)
    assert {name for names in TARGETS.values() for name in names} == set(OUTPUTS)


@pytest.mark.parametrize(("family", "target", "dtype"), CASES)
def test_every_family_verifies_in_every_format_that_holds_it(
    family, target, dtype, dense_of, layout_of, tokens_BT, tmp_path, record_property
):
    dense = dense_of(family, dtype=dtype, tied=dtype == "float32", **settings(family))
    layout = layout_of(dense, dtype=getattr(torch, dtype))
    record = export(dense, layout, tmp_path / "out", ExportConfig(format=target), tokens_BT)
    check = record.verification
    assert record.format == target
    assert check.loaded_class.startswith(f"transformers.models.{target}.")
    record_property("block_error", max(layer.block_error for layer in check.layers))
    record_property("block_floor", max(layer.block_floor for layer in check.layers))
    record_property("misrouted", max(layer.misrouted for layer in check.layers))
    record_property("logits_error", check.logits_error)


@pytest.mark.parametrize("family", TARGETS)
def test_auto_takes_glm4_moe_or_the_native_twin(family, dense_of, layout_of, tokens_BT, tmp_path):
    dense = dense_of(family, **settings(family))
    record = export(dense, layout_of(dense), tmp_path / "out", ExportConfig(), tokens_BT)
    assert record.format == TARGETS[family][0]


@pytest.mark.parametrize(
    ("family", "target"),
    [(f, t) for f, ts in TARGETS.items() for t in OUTPUTS if t not in ts],
)
def test_a_format_that_cannot_hold_a_model_says_why_and_which_can(
    family, target, dense_of, layout_of, tokens_BT, tmp_path
):
    dense = dense_of(family, **settings(family))
    with pytest.raises(UserError, match=rf"but {target} .*{TARGETS[family][0]}|which {target}"):
        export(dense, layout_of(dense), tmp_path / "out", ExportConfig(format=target), tokens_BT)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("family", "target", "loaded"),
    [
        ("llama", "glm4_moe", "Glm4MoeForCausalLM"),
        ("qwen2", "qwen2_moe", "Qwen2MoeForCausalLM"),
        ("granite", "granitemoe", "GraniteMoeSharedForCausalLM"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_neurons_that_are_always_on_become_the_shared_expert(
    family, target, loaded, dtype, dense_of, layout_of, tokens_BT, tmp_path
):
    dense = dense_of(family, dtype=dtype, intermediate_size=120, **settings(family))
    layout = with_always_on(layout_of(dense, dtype=getattr(torch, dtype)))
    assert (layout.shared_size, layout.expert_size) == (24, 8)
    record = export(dense, layout, tmp_path / "out", ExportConfig(format=target), tokens_BT)
    assert record.verification.loaded_class.endswith(loaded)


@pytest.mark.parametrize(
    ("family", "target"), [("llama", "glm4_moe"), ("qwen2", "qwen2_moe"), ("qwen3", "qwen3_moe")]
)
def test_leading_layers_can_stay_dense(family, target, dense_of, layout_of, tokens_BT, tmp_path):
    dense = dense_of(family, num_hidden_layers=3)
    layout = with_always_on(layout_of(dense), shared=0, dense_layers=1)
    record = export(dense, layout, tmp_path / "out", ExportConfig(format=target), tokens_BT)
    assert len(record.verification.layers) == len(record.routers) == 2
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.get("first_k_dense_replace") == 1 or config["mlp_only_layers"] == [0]


@pytest.mark.parametrize("target", ["mixtral", "qwen3_moe", "granitemoe", "flex_olmo"])
def test_what_a_format_has_no_place_for_is_refused(
    target, dense_of, layout_of, tokens_BT, tmp_path
):
    family = next(name for name, targets in TARGETS.items() if target in targets)
    dense = dense_of(family, num_hidden_layers=3, **settings(family))
    layouts = {
        "shared expert": with_always_on(layout_of(dense)),
        "leading layers dense": with_always_on(layout_of(dense), shared=0, dense_layers=1),
    }
    allowed = {"qwen3_moe": "leading layers dense", "granitemoe": "shared expert"}
    for words, layout in layouts.items():
        if allowed.get(target) != words:
            config = ExportConfig(format=target)
            with pytest.raises(UserError, match=words):
                export(dense, layout, tmp_path / "out", config, tokens_BT)


def test_mixtral_keeps_the_sliding_window(dense_of, layout_of, tokens_BT, tmp_path):
    dense = dense_of("mistral", sliding_window=24)
    config = ExportConfig(format="mixtral")
    record = export(dense, layout_of(dense), tmp_path / "out", config, tokens_BT)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["sliding_window"] == 24
    assert written["max_position_embeddings"] == dense.widths.context
    # Verified on rows of 96 tokens, four times the window.
    assert record.verification.own_routes_top1_agreement > 0.9


RELOAD = """
import sys, torch
sys.modules["dotmoe"] = None
from transformers import AutoModelForCausalLM
tokens_BT = torch.load(sys.argv[1])
for folder in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        torch.save(model(input_ids=tokens_BT).logits, folder + ".logits")
"""


def test_plain_transformers_reloads_all_where_dotmoe_cannot_be_imported(
    dense_of, layout_of, tokens_BT, tmp_path
):
    references = {}
    for family, targets in TARGETS.items():
        dense = dense_of(family, **settings(family))
        layout = layout_of(dense)
        with torch.no_grad(), masked_by(dense, layout):
            reference_BTV = dense.model(input_ids=tokens_BT).logits
        for target in targets:
            folder = tmp_path / f"{family}-{target}"
            export(dense, layout, folder, ExportConfig(format=target), tokens_BT)
            references[str(folder)] = reference_BTV
    torch.save(tokens_BT, tmp_path / "tokens.pt")
    files = [str(tmp_path / "tokens.pt"), *references]
    subprocess.run([sys.executable, "-c", RELOAD, *files], check=True)

    for folder, reference_BTV in references.items():
        error_BT = (torch.load(f"{folder}.logits") - reference_BTV).abs().mean(dim=-1)
        assert float(error_BT.median() / reference_BTV.std()) < 3e-3, folder
