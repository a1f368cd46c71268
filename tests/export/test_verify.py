"""Damage to a written export is found. Oracle: the masked dense model."""

import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from dotmoe.checkpoint.tensors import Tensors
from dotmoe.errors import VerificationError
from dotmoe.export import FORMATS, ExportConfig, export
from dotmoe.export.format import Conversion
from dotmoe.export.verify import (
    binary_gate_ffn,
    neuron_mask,
    problems,
    relative_error,
    routed,
    sample_tokens,
)
from dotmoe.moe.masked import masked_by
from dotmoe.moe.router import router_logits


@pytest.fixture
def exported(dense_of, layout_of, tokens_BT, tmp_path):
    """A verified export, to be damaged."""
    dense = dense_of("llama")
    layout = layout_of(dense)
    record = export(dense, layout, tmp_path / "out", ExportConfig(), tokens_BT)
    return dense, layout, tmp_path / "out", record


def damage(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def run_verify(exported, tokens):
    """What verification finds; the first problem is raised."""
    dense, layout, folder, record = exported
    conversion = Conversion(
        dense=dense,
        tensors=Tensors.of(dense),
        layout=layout,
        exponents={scale.layer: scale.exponent for scale in record.routers},
        dtype=torch.float32,
    )
    _, found = FORMATS["glm4_moe"].check(conversion, folder, tokens)
    if found:
        raise VerificationError(" ".join(found))


def expert(layer, number, projection="down"):
    return f"model.layers.{layer}.mlp.experts.{number}.{projection}_proj.weight"


def test_two_experts_with_swapped_down_projections_fail_at_their_layer(exported, tokens_BT):
    def swap(tensors):
        a, b = expert(1, 0), expert(1, 5)
        tensors[a], tensors[b] = tensors[b], tensors[a]

    damage(exported[2], swap)
    with pytest.raises(VerificationError, match=r"layer 1: .* block error is"):
        run_verify(exported, tokens_BT)


def test_one_wrong_expert_of_twelve_shows_in_the_tail(exported, tokens_BT):
    damage(exported[2], lambda tensors: tensors[expert(1, 4)].mul_(1.5))
    message = r"layer 1: 9.th percentile of the block error is \S+, limit"
    with pytest.raises(VerificationError, match=message):
        run_verify(exported, tokens_BT)


def test_all_experts_rotated_fail_with_layer_figure_and_limit(exported, tokens_BT):
    def rotate(tensors):
        first = tensors[expert(1, 0)]
        for number in range(11):
            tensors[expert(1, number)] = tensors[expert(1, number + 1)]
        tensors[expert(1, 11)] = first

    damage(exported[2], rotate)
    message = r"layer 1: median relative block error is \d.*, limit 0.002"
    with pytest.raises(VerificationError, match=message):
        run_verify(exported, tokens_BT)


@pytest.mark.parametrize(
    ("factor", "figure"),
    [
        (2.0**-11, "misrouted"),  # p far too large: scores collapse into ties
        (2.0**4, "median relative block error"),  # p too small: gates leave 1
        (-1.0, "misrouted by a clear margin"),
    ],
)
def test_a_wrongly_scaled_router_fails(factor, figure, exported, tokens_BT):
    def scale(tensors):
        tensors["model.layers.0.mlp.gate.weight"] *= factor

    damage(exported[2], scale)
    with pytest.raises(VerificationError, match=f"layer 0: .*{figure}"):
        run_verify(exported, tokens_BT)


def test_a_shared_expert_that_contributes_fails(exported, tokens_BT):
    def wake(tensors):
        for name in ("gate", "up", "down"):
            tensors[f"model.layers.0.mlp.shared_experts.{name}_proj.weight"] += 0.05

    damage(exported[2], wake)
    with pytest.raises(VerificationError, match="layer 0: median relative block error"):
        run_verify(exported, tokens_BT)


def test_damage_outside_the_blocks_fails_on_the_logits(exported, tokens_BT):
    def turn(tensors):
        tensors["model.layers.1.self_attn.o_proj.weight"] *= 1.05

    damage(exported[2], turn)
    with pytest.raises(VerificationError, match=r"(top-1 disagreement|median logit error) is"):
        run_verify(exported, tokens_BT)


@pytest.mark.parametrize(
    "change",
    [
        {"routed_scaling_factor": 2.0},
        {"num_experts_per_tok": 13},
        {"rope_theta": 2e4},
        {"rope_theta": None},
        {"partial_rotary_factor": 0.5},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_config_that_is_not_what_was_written_is_found(change, exported, tokens_BT):
    path = exported[2] / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(VerificationError, match=r"config.json in .* is not what was written"):
        run_verify(exported, tokens_BT)


def test_nan_in_a_weight_is_named(exported, tokens_BT):
    damage(exported[2], lambda tensors: tensors["model.norm.weight"].fill_(math.nan))
    with pytest.raises(VerificationError, match=r"model.norm.weight .* contains NaN"):
        run_verify(exported, tokens_BT)


def test_a_missing_tensor_is_named(exported, tokens_BT):
    damage(exported[2], lambda tensors: tensors.pop("model.layers.0.mlp.gate.weight"))
    with pytest.raises(VerificationError, match="missing_keys"):
        run_verify(exported, tokens_BT)


def test_export_leaves_the_dense_model_as_it_was(dense_of, layout_of, tokens_BT, tmp_path):
    dense = dense_of("qwen2", dtype="bfloat16", load_dtype="bfloat16")
    before = {name: tensor.clone() for name, tensor in dense.model.state_dict().items()}
    layout = layout_of(dense, dtype=torch.bfloat16)
    record = export(dense, layout, tmp_path / "out", ExportConfig(), tokens_BT)
    after = dense.model.state_dict()
    assert before.keys() == after.keys()
    assert all(
        torch.equal(before[n], after[n]) and before[n].dtype == after[n].dtype for n in before
    )
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in dense.model.modules())
    assert record.problems == []


def test_a_nan_figure_is_beyond_every_limit(exported):
    found = replace(exported[3].verification, logits_error=math.nan)
    assert "median logit error is nan" in problems(found, 1.0, 0.0)[0]


def test_limits_of_logits_grow_with_the_depth(exported):
    found = replace(exported[3].verification, logits_error=0.009, dense_error=0.004)
    assert len(problems(found, 2e-3, 0.0)) == 2
    deep = replace(found, layers=found.layers * 8)
    assert problems(deep, 2e-3, 0.0) == []


def test_routed_with_the_masks_own_choice_is_the_masked_model(dense_of, layout_of, tokens_BT):
    dense = dense_of("qwen3")
    layout = layout_of(dense)
    chosen = {}

    def watch(index):
        def hook(module, arguments):
            logits = router_logits(arguments[0].flatten(0, 1), layout.router_LED[index])
            chosen[index] = logits.topk(3, dim=1).indices

        return hook

    with torch.no_grad():
        with masked_by(dense, layout):
            for index, layer in enumerate(dense.family.layers(dense.model)):
                layer.mlp.register_forward_pre_hook(watch(index))
            expected = dense.model(input_ids=tokens_BT).logits
        with routed(dense, layout, chosen):
            actual = dense.model(input_ids=tokens_BT).logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_the_block_reference_is_the_sum_of_expert_outputs(dense_of, layout_of):
    dense = dense_of("llama")
    layout = layout_of(dense)
    ffn = dense.family.ffn(dense.family.layers(dense.model)[0])
    x = torch.randn(20, 64)
    chosen = torch.stack([torch.randperm(12)[:3] for _ in range(20)])
    expected = torch.zeros(20, 64)
    for token in range(20):
        for number in chosen[token].tolist():
            rows = layout.neurons_of_expert(0)[number]
            gate, up = ffn.gate.weight[rows] @ x[token], ffn.up.weight[rows] @ x[token]
            expected[token] += ffn.down.weight[:, rows] @ (gate * torch.sigmoid(gate) * up)
    mask = neuron_mask(chosen, layout, 0)
    actual = binary_gate_ffn(x, mask, iter((ffn.gate.weight, ffn.up.weight, ffn.down.weight)))
    assert float(relative_error(actual, expected).max()) < 1e-5


@pytest.mark.parametrize(
    ("shape", "limit", "context", "expected"),
    [
        ((4, 96), 512, 256, (4, 96)),
        ((4, 96), 200, 256, (2, 96)),
        ((4, 96), 50, 256, (1, 50)),
        ((4, 96), 160, 40, (4, 40)),
    ],
)
def test_samples_keep_to_the_limit_and_the_context(shape, limit, context, expected):
    assert tuple(sample_tokens(torch.zeros(shape, dtype=torch.long), limit, context).shape) == (
        expected
    )
