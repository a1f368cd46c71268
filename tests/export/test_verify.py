import dataclasses
import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from dotmoe.errors import UserError
from dotmoe.export import ExportConfig, VerificationError, VerifyConfig, export, output_named
from dotmoe.export.layer_check import binary_gate_ffn, relative_error
from dotmoe.export.reference import neuron_mask, routed, sample_tokens
from dotmoe.export.verify import judge, limits_of, verify
from dotmoe.moe.router import router_logits
from dotmoe.moe.surgery import masked_by


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
    dense, layout, folder, _ = exported
    output = output_named("glm4_moe")
    record = verify(dense, layout, folder, tokens, VerifyConfig(), output)
    judge(record, limits_of(output, VerifyConfig()))


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
    damage(exported[2], lambda tensors: tensors[expert(1, 4)].mul_(1.2))
    message = r"layer 1: 99th percentile of the block error is \S+, limit 0.01"
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
    with pytest.raises(VerificationError, match=r"(top-1 disagreement|mean logit error) is"):
        run_verify(exported, tokens_BT)


@pytest.mark.parametrize(
    "change",
    [
        {"routed_scaling_factor": 1.0},
        {"norm_topk_prob": True},
        {"rope_theta": 2e4, "rope_parameters": {"rope_type": "default", "rope_theta": 2e4}},
        {"partial_rotary_factor": 0.5, "rope_parameters": {"rope_theta": 1e4}},
        {"rms_norm_eps": 1e-2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_wrong_config_value_fails(change, exported, tokens_BT):
    path = exported[2] / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(VerificationError, match="differs from the masked dense model"):
        run_verify(exported, tokens_BT)


def test_nan_in_a_weight_is_named(exported, tokens_BT):
    damage(exported[2], lambda tensors: tensors["model.norm.weight"].fill_(math.nan))
    with pytest.raises(VerificationError, match=r"model.norm.weight .* holds NaN"):
        run_verify(exported, tokens_BT)


def test_a_missing_tensor_is_named(exported, tokens_BT):
    damage(exported[2], lambda tensors: tensors.pop("model.layers.0.mlp.gate.weight"))
    with pytest.raises(VerificationError, match="missing_keys"):
        run_verify(exported, tokens_BT)


def test_a_tensor_without_elements_is_named(exported, tokens_BT):
    damage(exported[2], lambda tensors: tensors.update(empty=torch.zeros(0, 4)))
    with pytest.raises(VerificationError, match=r"empty in .* has no elements"):
        run_verify(exported, tokens_BT)


@pytest.mark.parametrize("key", ["rope_theta", "rope_parameters", "torch_dtype", "dtype"])
def test_a_missing_config_key_is_named(key, exported, tokens_BT):
    path = exported[2] / "config.json"
    config = json.loads(path.read_text())
    del config[key]
    path.write_text(json.dumps(config))
    with pytest.raises(VerificationError, match=f"lacks {key}"):
        run_verify(exported, tokens_BT)


def test_more_active_experts_than_experts_is_refused(exported, tokens_BT):
    path = exported[2] / "config.json"
    config = json.loads(path.read_text()) | {"num_experts_per_tok": 13}
    path.write_text(json.dumps(config))
    with pytest.raises(VerificationError, match=r"num_experts_per_tok is 13 .* Choose 1 to 12"):
        run_verify(exported, tokens_BT)


def test_weights_changed_in_memory_are_refused(dense_of, layout_of, tokens_BT, tmp_path):
    dense = dense_of("llama")
    with torch.no_grad():
        dense.model.get_parameter("model.layers.1.mlp.up_proj.weight")[0, 0] += 1
    with pytest.raises(UserError, match=r"layers.1.mlp.up_proj.weight differs .* Save the model"):
        export(dense, layout_of(dense), tmp_path / "out", ExportConfig(), tokens_BT)
    assert list(tmp_path.iterdir()) == []


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
    assert record.verification.logits_floor > 1e-3  # bfloat16 noise was measured, not assumed


def test_a_nan_figure_is_beyond_every_limit(exported):
    record = dataclasses.replace(exported[3].verification, logits_error=math.nan)
    with pytest.raises(VerificationError, match="nan"):
        judge(record, VerifyConfig(block_error=1.0, block_ratio=1.0))


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
    actual = binary_gate_ffn(x, mask, (ffn.gate.weight, ffn.up.weight, ffn.down.weight))
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
