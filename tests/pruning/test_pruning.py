"""Methods that prune: each against its definition written out serially, and as rows of a table."""

import copy
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from document_tables.paper_models import paper_models
from dotmoe.common.errors import UserError
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.family import family_of
from dotmoe.models.meta_model import meta_model, num_parameters
from dotmoe.rivals.pruning import PRUNING, PruneInputs, by_curvature, prune, two_of_four
from dotmoe.rivals.pruning.contract import compensated
from dotmoe.rivals.pruning.disp_llm import disp_llm, gated, kept_parameters
from dotmoe.rivals.pruning.llm_pruner import removed_parameters
from dotmoe.rivals.pruning.modegpt import joint_rank
from dotmoe.rivals.pruning.slicegpt import sliced, sliced_parameters
from dotmoe.rivals.pruning.two_of_four import corrected, kept_of_four
from runs import TINY_CONVERT, passed

STOCK = [name for name in PRUNING if PRUNING[name].applied is None]
TWO_OF_FOUR = [name for name in PRUNING if name.endswith("2_4")]


def weights_of(dense):
    return {name: p.detach().clone() for name, p in dense.model.named_parameters()}


def linears_of(dense):
    """Names and linear maps of the decoder layers."""
    return {
        name: module
        for name, module in dense.model.named_modules()
        if isinstance(module, nn.Linear) and ".layers." in name
    }


@torch.no_grad()
def inputs_of(dense, tokens_BT):
    """What every linear map of the decoder layers reads, [T, I], by name; stock forward pass."""
    seen = passed(linears_of(dense), lambda: dense.model(input_ids=tokens_BT))
    return {name: x.flatten(0, 1).double().numpy() for name, (x, _) in seen.items()}


@pytest.fixture(autouse=True)
def _few_shots(monkeypatch):
    monkeypatch.setattr(by_curvature, "SHOTS", 3)


@pytest.fixture
def pruned_of(dense_of, tokens_BT, tmp_path):
    """The model in memory, its weights before, figures with what is `removed`, and the folder."""

    def make(method, family="llama", *, removing=10**9, **options):
        dense = dense_of(family, **options)
        before, whole = weights_of(dense), num_parameters(dense.model)
        folder = tmp_path / f"{method}-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        trained = {"batch": lambda step: tokens_BT[step % 4 :][:2], "steps": 3}
        wanted = max(0, whole - removing)
        figures = prune(
            method, PruneInputs(dense=dense, tokens_BT=tokens_BT, wanted=wanted, **trained), folder
        )
        assert figures["stored"] == figures["parameters"]
        removed = {"removed": whole - figures["parameters"]}
        return dense, before, figures | removed, folder / "model"

    return make


@pytest.mark.parametrize(
    ("method", "family", "options", "why"),
    [
        ("wanda_2_4", "llama", {"intermediate_size": 90}, "reads 90 features, not a multiple of 4"),
        ("modegpt", "qwen3", {}, "qwen3 has norms of queries and keys"),
        ("llm_pruner", "olmo2", {}, "olmo2 has a norm over all heads at once"),
        ("slicegpt", "olmo2", {}, "olmo2 has norms after attention and FFN"),
    ],
)
def test_a_model_that_a_method_does_not_fit_is_refused(method, family, options, why, pruned_of):
    with pytest.raises(UserError, match=why):
        pruned_of(method, family, **options)


# --- two of four


def test_of_equal_scores_the_later_are_kept():
    score = torch.tensor([[3.0, 1, 2, 0, 1, 1, 1, 1], [0, 0, 0, 5, -1, -2, -3, -4]])
    expected = [[1, 0, 1, 0, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1, 0, 0]]
    assert kept_of_four(score).int().tolist() == expected


@pytest.mark.parametrize("method", TWO_OF_FOUR)
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_every_four_weights_of_a_layer_have_two_zeros_and_nothing_else_changes(
    method, family, pruned_of
):
    dense, before, figures, _ = pruned_of(method, family)
    pruned = {f"{name}.weight" for name in linears_of(dense)}
    for name, weight in weights_of(dense).items():
        if name in pruned:
            assert ((weight == 0).view(len(weight), -1, 4).sum(-1) == 2).all()
        else:
            assert torch.equal(weight, before[name])
    assert 2 * figures["removed"] == sum(before[name].numel() for name in pruned)


@pytest.mark.parametrize("method", ["magnitude_2_4", "wanda_2_4", "sparsegpt_2_4"])
def test_maps_are_pruned_by_what_they_read_behind_pruned_layers(method, pruned_of, tokens_BT):
    dense, before, *_ = pruned_of(method, "qwen2")
    now = weights_of(dense)
    for layer in range(2):  # the stock model as it was when this layer's turn came
        for name, p in dense.model.named_parameters():
            p.data = (now if f".layers.{layer - 1}." in name else before)[name].clone()
        for name, x_TI in inputs_of(dense, tokens_BT).items():
            if f".layers.{layer}." in name:
                weight_OI, x_TI = before[f"{name}.weight"].double(), torch.tensor(x_TI)
                score_OI = weight_OI.abs()
                if method == "wanda_2_4":
                    score_OI *= x_TI.square().sum(0).sqrt()
                expected = weight_OI * kept_of_four(score_OI)
                if method == "sparsegpt_2_4":
                    expected = corrected(x_TI.T @ x_TI, weight_OI)
                torch.testing.assert_close(now[f"{name}.weight"], expected.float())


@pytest.mark.parametrize("family", ["qwen2", "phi3"])
def test_pruner_zero_keeps_what_the_serial_definition_keeps(family, dense_of, pruned_of, tokens_BT):
    dense, squares = dense_of(family), {}
    dense.model.requires_grad_(True)
    for row in tokens_BT:  # each window has a loss of its own
        dense.model.zero_grad()
        dense.model(row[None], labels=row[None]).loss.backward()
        for name, linear in linears_of(dense).items():
            squares[name] = squares.get(name, 0) + linear.weight.grad.double().numpy() ** 2
    found, before, *_ = pruned_of("pruner_zero_2_4", family)
    for name, linear in linears_of(found).items():
        weight, slope = before[f"{name}.weight"].double().numpy(), np.sqrt(squares[name])
        score = weight**2 * (slope - slope.min())
        fours, kept = score.reshape(-1, 4), linear.weight.numpy().reshape(-1, 4) != 0
        largest_gone = np.where(kept, 0, fours).max(1)
        assert (largest_gone <= np.where(kept, fours, np.inf).min(1) * (1 + 1e-3)).all()
    assert not any(p.requires_grad or p.grad is not None for p in found.model.parameters())


@pytest.fixture
def correlated():
    """Weights [O, I] and correlated inputs [T, I] of one linear map, float64."""
    generator = torch.Generator().manual_seed(7)
    mixing, noise = (torch.randn(*size, generator=generator) for size in ((6, 16), (40, 16)))
    x_TI = torch.randn(40, 6, generator=generator) @ mixing + 0.3 * noise
    return torch.randn(5, 16, generator=generator).double(), x_TI.double()


@pytest.mark.parametrize("columns", [4, 8, 128])
def test_wanda_and_sparsegpt_agree_with_llm_compressor(columns, monkeypatch):
    """Tensors of tests/pruning/fixtures, made by that library in an environment of its own."""
    monkeypatch.setattr(two_of_four, "_COLUMNS_AT_ONCE", columns)
    made = load_file(Path(__file__).parent / "fixtures/llm_compressor.safetensors")
    weight_OI, x_TI = made["weight_OI"].double(), made["x_BTI"].flatten(0, 1).double()
    wanda_OI = weight_OI * kept_of_four(weight_OI.abs() * x_TI.square().sum(0).sqrt())
    assert torch.equal(wanda_OI.float(), made["wanda_OI"])
    found = corrected(x_TI.T @ x_TI, weight_OI)
    expected = made["sparsegpt_OI"].double()
    assert torch.equal(found == 0, expected == 0)
    assert (found - expected).norm() < 1e-5 * expected.norm()


# --- whole layers


def layers_of(dense, number):
    """Parameters of so many layers, and some more."""
    return int((number + 0.3) * num_parameters(dense.model.model.layers[0]))


@torch.no_grad()
def loss_of(dense, tokens_BT, layers):
    """Mean next-token loss of a dense model that has some of its layers alone."""
    model = copy.deepcopy(dense.model)
    if types := getattr(model.config, "layer_types", None):
        model.config.layer_types = [types[layer] for layer in layers]
    model.model.layers = nn.ModuleList(model.model.layers[layer] for layer in layers)
    return float(model(tokens_BT, labels=tokens_BT, use_cache=False).loss)


@pytest.mark.parametrize("method", ["shortgpt", "sleb"])
@pytest.mark.parametrize("family", ["qwen2", "granite"])
def test_dropped_layers_are_in_neither_config_nor_weights(
    method, family, dense_of, pruned_of, tokens_BT
):
    options = {"num_hidden_layers": 5}
    if family == "qwen2":
        types = ["full_attention", "sliding_attention"] * 2 + ["full_attention"]
        options |= {"layer_types": types, "use_sliding_window": True, "sliding_window": 32}
    dense = dense_of(family, **options)
    dropped, _, figures, folder = pruned_of(method, family, removing=layers_of(dense, 2), **options)
    kept = [layer for layer in range(5) if layer not in figures["plan"]["layers"]]
    assert len(kept) == 3
    config = json.loads((folder / "config.json").read_text())
    assert config["num_hidden_layers"] == 3
    if family == "qwen2":
        assert config["layer_types"] == [types[layer] for layer in kept]
    stored = {name for file in folder.glob("*.safetensors") for name in load_file(file)}
    assert not [name for name in stored if ".layers.3." in name]
    assert figures["removed"] == 2 * num_parameters(dense.model.model.layers[0])
    stock = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert stock.num_parameters() == figures["parameters"]
    with torch.no_grad():
        loss = float(stock(tokens_BT, labels=tokens_BT).loss)
    assert loss == pytest.approx(loss_of(dense, tokens_BT, kept), abs=1e-5)
    assert dropped.widths.layers == 3


def test_shortgpt_drops_the_layers_of_least_turn(dense_of, pruned_of, tokens_BT):
    dense, scores = dense_of("llama", num_hidden_layers=5), []
    layers = dict(enumerate(dense.model.model.layers))
    for stream in passed(layers, lambda: dense.model(tokens_BT)).values():
        x, y = (each.flatten(0, 1).detach().double().numpy() for each in stream)
        cosine = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(x, y, strict=True)]
        scores.append(1 - np.mean(cosine))
    for number in (1, 3):
        removing = layers_of(dense, number)
        *_, figures, _ = pruned_of("shortgpt", num_hidden_layers=5, removing=removing)
        assert figures["plan"]["layers"] == list(np.argsort(scores)[:number])


def test_sleb_drops_what_costs_least_each_time_and_neither_end(dense_of, pruned_of, tokens_BT):
    dense, left = dense_of("llama", num_hidden_layers=5), list(range(5))
    *_, figures, _ = pruned_of("sleb", num_hidden_layers=5)
    for dropped in figures["plan"]["layers"]:
        trials = {
            layer: loss_of(dense, tokens_BT, [each for each in left if each != layer])
            for layer in left[1:-1]
        }
        assert dropped == min(trials, key=trials.get)
        left.remove(dropped)
    assert left == [0, 4]


# --- the width of the stream


@torch.no_grad()
def really_sliced(dense, axes_SDK, tokens_BT):
    """Logits of a model whose matrices are rotated and cut, with the stream K wide throughout."""
    model = copy.deepcopy(dense.model).double()
    trunk, size = model.model, dense.config.hidden_size
    places = [*axes_SDK.double(), torch.eye(size).double()]

    def read_by(axes, norm, *linears):  # with the norm folded in
        for linear in linears:
            linear.weight.data = linear.weight * norm.weight @ axes

    def normed(x):
        eps = dense.config.rms_norm_eps
        return x / (x.square().sum(-1, keepdim=True) / size + eps).sqrt()

    rotary = trunk.rotary_emb(places[0], torch.arange(tokens_BT.shape[1])[None])
    now, x = places[0], trunk.embed_tokens(tokens_BT) @ places[0]
    for layer, middle, after in zip(trunk.layers, places[1::2], places[2::2], strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        read_by(now, layer.input_layernorm, attention.q_proj, attention.k_proj, attention.v_proj)
        read_by(middle, layer.post_attention_layernorm, mlp.gate_proj, mlp.up_proj)
        attention.o_proj.weight.data = middle.T @ attention.o_proj.weight
        mlp.down_proj.weight.data = after.T @ mlp.down_proj.weight
        added = attention(normed(x), position_embeddings=rotary, attention_mask=None)[0]
        x = x @ (now.T @ middle) + added
        x = x @ (middle.T @ after) + mlp(normed(x))
        now = after
    read_by(now, trunk.norm, model.lm_head)
    return model.lm_head(normed(x))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_projected_model_is_the_really_sliced_one(family, pruned_of, tokens_BT):
    dense, before, figures, folder = pruned_of("slicegpt", family, removing=0, num_hidden_layers=3)
    assert all(torch.equal(before[name], p) for name, p in weights_of(dense).items())
    kept = load_file(folder.parent / "tensors.safetensors")["axes_SDK"]
    assert kept.shape == (6, 64, figures["plan"]["width"])
    assert figures["plan"]["width"] in range(16, 64, 8)
    with torch.no_grad(), sliced(dense, kept):
        found = dense.model(tokens_BT).logits.double()
    expected = really_sliced(dense, kept, tokens_BT)
    assert (found - expected).norm() < 1e-4 * expected.norm()
    assert (dense.model(tokens_BT).logits - expected).norm() > 0.1 * expected.norm()


def test_the_first_axes_are_the_principal_ones_and_all_of_them_are_the_dense_model(
    pruned_of, tokens_BT
):
    dense, _, figures, folder = pruned_of("slicegpt", removing=-(10**9))
    axes_SDK = load_file(folder.parent / "tensors.safetensors")["axes_SDK"]
    assert figures["plan"]["width"] == dense.config.hidden_size
    with torch.no_grad():
        expected = dense.model(tokens_BT).logits
        with sliced(dense, axes_SDK):
            found = dense.model(tokens_BT).logits
    assert (found - expected).norm() < 1e-4 * expected.norm()
    x_TD = dense.model.model.embed_tokens(tokens_BT).flatten(0, 1).detach().double().numpy()
    energy = np.square(x_TD @ axes_SDK[0].double().numpy()).sum(0)  # largest last
    singular = np.linalg.svd(x_TD, compute_uv=False)
    np.testing.assert_allclose(energy[::-1], singular**2, rtol=1e-3, atol=1e-3)


def published(name):
    """A model of the paper without weights."""
    config = paper_models()[name]
    return DenseModel(model=meta_model(config), weights="meta", family=family_of(config), source="")


def by_width(width):
    return lambda dense: sliced_parameters(dense, width)


def by_share(share):
    """What is left where each selection of the stream keeps that share; biases are not counted."""

    def left(dense):
        size, layers = dense.widths.model, dense.widths.layers

        def kept(width):
            return kept_parameters(dense, [*[width] * 3, dense.widths.ffn, width] * layers)

        named = dense.model.named_parameters()
        total = sum(p.numel() for name, p in named if "bias" not in name)
        return total - kept(size) + kept(share * size)

    return left


def by_groups(dense):
    idle = torch.tensor(dense.widths.ffn // 4)
    return num_parameters(dense.model) - int(removed_parameters(dense, idle))


@pytest.mark.parametrize(
    ("model", "left", "billions"),
    [
        ("LLaMA-2-7B", by_width(2048), 3.7298),
        ("LLaMA-3-8B", by_width(1720), 3.9042),
        ("Qwen2.5-7B", by_width(2000), 4.7478),
        ("LLaMA-3-8B", by_groups, 6.612586496),
        ("LLaMA-2-7B", by_share(0.51), 3.5652),
        ("LLaMA-3-8B", by_share(0.40), 3.8427),
        ("Qwen2.5-7B", by_share(0.585), 4.9075),
        ("Qwen2.5-7B", by_share(0.395), 3.6677),
    ],
)
def test_published_settings_leave_the_published_counts(model, left, billions):
    digits = len(str(billions)) - 2
    assert round(left(published(model)) / 1e9, digits) == billions


# --- groups


WRITING = ("o_proj.weight", "down_proj.weight")


def orders_of(layer, num_heads, num_neurons):
    """Key-value heads with their queries, and neurons: by summed |w dL/dw|, least first."""
    heads, neurons = np.zeros(num_heads), np.zeros(num_neurons)
    for name, p in layer.named_parameters():
        if p.dim() == 2:
            worth = (p * p.grad).abs().detach().double().numpy()
            scores = neurons if "mlp" in name else heads
            scores += worth.sum(0 if name.endswith(WRITING) else 1).reshape(len(scores), -1).sum(1)
    return np.argsort(heads), np.argsort(neurons)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_llm_pruner_is_the_model_without_its_least_important_groups(
    family, dense_of, pruned_of, tokens_BT
):
    options = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 3}
    dense = dense_of(family, **options)
    removing = int(removed_parameters(dense, torch.tensor(40)))
    found, _, figures, _ = pruned_of("llm_pruner", family, removing=removing, **options)
    assert figures["plan"] == {"heads": 2, "neurons": 56, "layers": [0, 3]}
    dense.model.requires_grad_(True)(tokens_BT, labels=tokens_BT).loss.backward()
    removed, now = 0, weights_of(found)
    for layer, module in enumerate(dense.model.model.layers):
        heads, neurons = orders_of(module, 4, 96)
        for name, p in module.named_parameters():
            expected = p.detach().clone()
            if "norm" not in name:
                order, least = (neurons, neurons[:40]) if "mlp" in name else (heads, heads[:2])
                rows = expected.T if name.endswith(WRITING) else expected
                rows.unflatten(0, (len(order), -1))[least] = 0
            assert torch.equal(now[f"model.layers.{layer}.{name}"], expected)
            removed += int((expected == 0).sum())
    assert figures["removed"] == removed
    assert not any(p.requires_grad or p.grad is not None for p in found.model.parameters())


@pytest.mark.parametrize(("idle", "heads"), [(1, 2), (23, 2), (25, 1), (71, 1)])
def test_llm_pruner_keeps_the_nearest_number_of_few_heads(idle, heads, dense_of, pruned_of):
    """Of 96 neurons and two heads: one idle neuron does not cost half of attention."""
    options = {"num_attention_heads": 4, "num_key_value_heads": 2}
    removing = int(removed_parameters(dense_of("llama", **options), torch.tensor(idle)))
    *_, figures, _ = pruned_of("llm_pruner", removing=removing, **options)
    assert (figures["plan"]["neurons"], figures["plan"]["heads"]) == (96 - idle, heads)


def test_llm_pruner_finds_the_parts_of_fused_projections(pruned_of):
    dense, *_ = pruned_of("llm_pruner", "phi3")
    for layer in dense.model.model.layers:
        gate, up = layer.mlp.gate_up_proj.weight.chunk(2)
        kept = gate.any(1)
        assert kept.sum() == 1
        assert torch.equal(kept, up.any(1))
        assert torch.equal(kept, layer.mlp.down_proj.weight.any(0))
        used = layer.self_attn.o_proj.weight.any(0).view(2, 32).any(1)  # 2 of 4 query heads each
        query, key, value = layer.self_attn.qkv_proj.weight.split([64, 32, 32])
        assert used.sum() == 1
        for rows in (query, key, value):
            assert torch.equal(rows.view(2, -1).any(1), used)


# --- selections of the stream


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_disp_llm_leaves_zeros_and_is_what_was_trained(family, dense_of, pruned_of, tokens_BT):
    dense = dense_of(family)
    found, before, figures, _ = pruned_of("disp_llm", family, removing=25_000)
    assert 24_700 < figures["removed"] <= 25_000
    assert figures["calibration_tokens"] == 3 * 2 * 96
    masks, gone = [], 0
    for index, layer in enumerate(found.model.model.layers):
        attention, ffn = layer.self_attn, layer.mlp
        reads, writes = attention.v_proj.weight.any(0), attention.o_proj.weight.any(1)
        ffn_reads, neurons = ffn.up_proj.weight.any(0), ffn.up_proj.weight.any(1)
        ffn_writes = ffn.down_proj.weight.any(1)
        masks += [reads, writes, ffn_reads, neurons, ffn_writes]
        every = torch.tensor([True])
        for name, rows, columns in (
            *((f"self_attn.{each}_proj", every, reads) for each in "qkv"),
            ("self_attn.o_proj", writes, every),
            *((f"mlp.{each}_proj", neurons, ffn_reads) for each in ("gate", "up")),
            ("mlp.down_proj", ffn_writes, neurons),
        ):
            linear, place = layer.get_submodule(name), f"model.layers.{index}.{name}"
            kept = (rows[:, None] & columns).expand_as(linear.weight)
            assert torch.equal(linear.weight, before[f"{place}.weight"] * kept)
            assert linear.bias is None or torch.equal(linear.bias, before[f"{place}.bias"])
            gone += int((~kept).sum())
    assert figures["plan"]["selected"] == [int(mask.sum()) for mask in masks]
    assert figures["removed"] == gone
    with torch.no_grad(), gated(dense, [mask.float() for mask in masks]):  # as the training gates
        expected = dense.model(tokens_BT).logits
    logits = found.model(tokens_BT).logits
    assert (logits - expected).norm() < 1e-5 * expected.norm()


def test_selections_follow_seed_and_training(dense_of, tokens_BT):
    text = {"tokens_BT": tokens_BT, "batch": lambda step: tokens_BT, "wanted": 70_000}

    @torch.no_grad()
    def plan(seed, steps):
        return disp_llm(PruneInputs(dense=dense_of("llama"), **text, steps=steps, seed=seed)).plan

    assert plan(1, 2) == plan(1, 2)
    assert plan(1, 2) != plan(2, 2)
    assert plan(1, 0) != plan(1, 2)


# --- modules by decomposition


def ridge_of(moment_II):
    return 0.01 * np.trace(moment_II) / len(moment_II)


def test_columns_that_stay_are_the_ridge_regression_on_what_all_did(correlated):
    weight_OI, x_TI = (each.numpy() for each in correlated)
    kept = np.arange(16) % 3 != 0
    found = compensated(correlated[0], correlated[1].T @ correlated[1], torch.tensor(kept))
    root = np.sqrt(ridge_of(x_TI.T @ x_TI)) * np.eye(kept.sum())
    inputs = np.vstack([x_TI[:, kept], root])
    outputs = np.vstack([x_TI @ weight_OI.T, root @ weight_OI[:, kept].T])
    expected = np.linalg.lstsq(inputs, outputs, rcond=None)[0].T
    np.testing.assert_allclose(found[:, torch.tensor(kept)], expected, rtol=1e-8)
    assert not found[:, ~torch.tensor(kept)].any()


@pytest.mark.parametrize("rank", [1, 3, 4])
def test_values_and_outputs_become_the_truncated_svd_of_their_product(rank, correlated):
    generator, x_TD = np.random.default_rng(0), correlated[1].numpy()
    value_VD, output_RDV = generator.normal(size=(4, 16)), generator.normal(size=(2, 16, 4))
    values_TV = torch.tensor(x_TD @ value_VD.T)
    there, back = joint_rank(
        values_TV.T @ values_TV, torch.tensor(output_RDV).transpose(1, 2), rank
    )
    assert (there.shape, back.shape) == ((rank, 4), (4, rank))
    outputs = np.hstack(output_RDV.transpose(0, 2, 1))
    found = x_TD @ value_VD.T @ there.numpy().T @ back.numpy().T @ outputs
    u, s, v = np.linalg.svd(x_TD @ value_VD.T @ outputs)
    expected = (u[:, :rank] * s[:rank]) @ v[:rank]
    np.testing.assert_allclose(found, expected, atol=1e-8 * s[0])


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "granite"])
def test_modegpt_keeps_the_leading_parts_of_the_dense_model(family, dense_of, pruned_of, tokens_BT):
    read = inputs_of(dense_of(family), tokens_BT)
    found, before, figures, _ = pruned_of("modegpt", family, removing=30_000)
    assert abs(figures["removed"] - 30_000) < 1_000
    removed, now = 0, weights_of(found)
    for layer, (neurons, features, rank) in enumerate(figures["plan"]["neurons_features_ranks"]):
        name = f"model.layers.{layer}.mlp.down_proj"
        gram = read[name].T @ read[name]
        leverage = np.diag(gram @ np.linalg.inv(gram + ridge_of(gram) * np.eye(96)))
        kept_N = torch.zeros(96, dtype=torch.bool)
        kept_N[np.argsort(-leverage)[:neurons].copy()] = True
        fitted = compensated(before[f"{name}.weight"].double(), torch.tensor(gram), kept_N)
        torch.testing.assert_close(now[f"{name}.weight"], fitted.float(), rtol=0, atol=1e-5)
        attention = found.model.model.layers[layer].self_attn
        if family == "phi3":
            query, key, value = attention.qkv_proj.weight.split([64, 32, 32])
            biases = 0
        else:
            query, key, value = (getattr(attention, f"{n}_proj").weight for n in "qkv")
            biases = int(attention.q_proj.bias is not None)
        rows = [each.any(1).view(2, -1, 16) for each in (query, key, value)]
        for head in range(2):  # both queries of a key keep its features, in pairs
            assert (rows[0][head] == rows[1][head]).all()
            assert torch.equal(rows[1][head, 0, :8], rows[1][head, 0, 8:])
            assert int(rows[1][head].sum()) == features
            assert int(rows[2][head].sum()) == rank
        removed += (96 - neurons) * 3 * 64 + (16 - features) * 6 * (64 + biases)
        removed += (16 - rank) * (2 * (64 + biases) + 4 * 64)
    assert figures["removed"] == removed


def test_pairs_of_features_are_chosen_by_what_attention_multiplies(pruned_of, dense_of, tokens_BT):
    dense = dense_of("qwen2")
    attention, x_TI = dense.model.model.layers[0].self_attn, inputs_of(dense, tokens_BT)
    x_BTD = torch.tensor(x_TI["model.layers.0.self_attn.q_proj"]).view(4, 96, 64)
    angle = torch.arange(96)[:, None] * 10_000.0 ** (-torch.arange(8) / 8)
    turn = torch.polar(torch.ones(96, 8), angle)
    worth = []
    for linear in (attention.q_proj, attention.k_proj):
        rows = x_BTD @ linear.weight.double().T + linear.bias.double()
        first, second = rows.view(4, 96, -1, 2, 8).unbind(3)
        turned = torch.complex(first, second) * turn[:, None]
        worth.append(torch.stack([turned.real, turned.imag], -2).square().sum((0, 1)))
    query, key = worth  # [heads, 2, pairs]
    score = (query.view(2, 2, 2, 8).sum(1) * key).sqrt().sum(1)
    found, _, figures, _ = pruned_of("modegpt", "qwen2", removing=30_000)
    pairs = figures["plan"]["neurons_features_ranks"][0][1] // 2
    kept = found.model.model.layers[0].self_attn.k_proj.weight.any(1).view(2, 16)[:, :8]
    for head in range(2):
        assert set(kept[head].nonzero()[:, 0].tolist()) == set(
            score[head].argsort(descending=True)[:pairs].tolist()
        )


# --- rows and columns by curvature


@pytest.mark.parametrize("family", ["qwen2", "phi3"])
def test_curvature_is_summed_over_the_tokens_of_every_window(family, dense_of, tokens_BT):
    dense, sums, losses = dense_of(family), {}, []
    dense.model.requires_grad_(True)

    def run(row):
        losses.append(dense.model(row[None], labels=row[None]).loss)

    for row in tokens_BT:
        outputs = passed(linears_of(dense), partial(run, row))
        slopes = torch.autograd.grad(losses.pop(), [out for _, out in outputs.values()])
        for (name, (x, _)), slope in zip(outputs.items(), slopes, strict=True):
            x_TI, g_TO = x[0].detach().double().numpy(), slope[0].double().numpy()
            if linears_of(dense)[name].bias is not None:
                x_TI = np.hstack([x_TI, np.ones((len(x_TI), 1))])
            old = sums.get(name, (0, 0))
            sums[name] = old[0] + x_TI.T @ x_TI, old[1] + g_TO.T @ g_TO
    inputs = PruneInputs(dense=dense_of(family), tokens_BT=tokens_BT, wanted=0, batch=None)
    factors = by_curvature.curvature(inputs)
    for found, name in zip(factors, linears_of(dense), strict=True):
        for a, b in zip(found, sums[name], strict=True):
            assert np.linalg.norm(a.numpy() - b) < 1e-4 * np.linalg.norm(b)


@pytest.fixture
def kronecker():
    """Weights [O, I] and factors of one map, and both damped, float64."""
    generator = np.random.default_rng(3)
    weight = generator.normal(size=(4, 5))
    roots = generator.normal(size=(9, 5)), generator.normal(size=(9, 4))
    reads, slopes = (root.T @ root for root in roots)
    damped = [each + ridge_of(each) * np.eye(len(each)) for each in (reads, slopes)]
    return weight, reads, slopes, *damped


def places(shape, rows=(), columns=()):
    """Numbers of the weights in some rows or columns."""
    where = np.zeros(shape, bool)
    where[list(rows)], where[:, list(columns)] = True, True
    return np.flatnonzero(where)


def test_costs_are_those_of_the_whole_curvature_matrix(kronecker):
    weight, reads, slopes, damped_reads, damped_slopes = kronecker
    factors = torch.tensor(reads), torch.tensor(slopes)
    simple = by_curvature.damage(torch.tensor(weight), factors)
    surgeon = by_curvature.damage_left(torch.tensor(weight), factors)
    for kind, by_row in ((1, True), (0, False)):
        # The damped factor is the one that is inverted.
        hessian = np.kron(*((damped_slopes, reads) if by_row else (slopes, damped_reads)))
        for i in range(weight.shape[1 - kind]):
            gone = places(weight.shape, **{"rows" if by_row else "columns": [i]})
            w = weight.ravel()[gone]
            plain = w @ np.kron(slopes, reads)[np.ix_(gone, gone)] @ w / 2
            exact = w @ np.linalg.inv(np.linalg.inv(hessian)[np.ix_(gone, gone)]) @ w / 2
            np.testing.assert_allclose(simple[kind][i], plain, rtol=1e-10)
            np.testing.assert_allclose(surgeon[kind][i], exact, rtol=1e-8)


def test_the_surgeon_moves_the_rest_to_where_the_loss_is_least(kronecker):
    weight, reads, slopes, damped_reads, damped_slopes = kronecker
    rows, columns = [1, 2], [0, 3]
    inverse = np.linalg.inv(np.kron(damped_slopes, damped_reads))
    expected = weight.copy()
    for gone in (places(weight.shape, rows=rows), places(weight.shape, columns=columns)):
        solved = np.linalg.solve(inverse[np.ix_(gone, gone)], weight.ravel()[gone])
        expected -= (inverse[:, gone] @ solved).reshape(weight.shape)
    kept = torch.tensor([0, 1, 1, 0, 1]).bool(), torch.tensor([1, 0, 0, 1]).bool()
    factors = torch.tensor(reads), torch.tensor(slopes)
    found = by_curvature.moved(torch.tensor(weight), factors, kept)
    there = np.ix_(kept[1].numpy(), kept[0].numpy())
    np.testing.assert_allclose(found.numpy()[there], expected[there], rtol=1e-8)


@pytest.mark.parametrize("method", ["k_obd", "llm_surgeon"])
def test_rows_and_columns_go_until_the_budget_is_met(method, pruned_of):
    found, before, figures, _ = pruned_of(method, "qwen2", removing=20_000)
    removed = 0
    plan = figures["plan"]["columns_and_rows"]
    for (name, linear), (columns, rows) in zip(linears_of(found).items(), plan, strict=True):
        weight, bias = linear.weight, int(linear.bias is not None)
        assert int(weight.any(1).sum()) <= rows
        assert int(weight.any(0).sum()) <= columns - bias
        removed += weight.numel() + bias * len(weight) - rows * columns
        stays = weight != 0
        changed = not torch.equal(weight[stays], before[f"{name}.weight"][stays])
        assert changed == (method == "llm_surgeon" and not bool(stays.all()))
    assert removed == figures["removed"]
    assert 19_800 < removed <= 20_000


def test_what_costs_nothing_goes_within_the_budget_too(dense, tokens_BT):
    for layer in dense.family.layers(dense.model):
        layer.mlp.down_proj.weight.data[:, ::2] = 0  # half of the rows of gate and up cost nothing
    wanted = num_parameters(dense.model) - 1_000
    inputs = PruneInputs(dense=dense, tokens_BT=tokens_BT, wanted=wanted, batch=None)
    pruned = by_curvature.k_obd(inputs)
    assert 900 < pruned.removed <= 1_000
    counted = sum(
        each.weight.numel() - int(each.weight.any(0).sum()) * int(each.weight.any(1).sum())
        for each in linears_of(dense).values()
    )
    assert pruned.removed <= counted


def test_what_the_device_cannot_hold_is_refused_before_it_is_loaded(monkeypatch):
    memory = {"cpu": 1 << 40, "cuda": 1 << 34}  # the model itself is on neither
    monkeypatch.setattr(by_curvature, "memory_of", lambda device: memory[device.type])
    PRUNING["k_obd"].require(published("LLaMA-2-7B"), torch.device("cpu"))
    with pytest.raises(UserError, match=r"need 93.15 GiB for .* curvature, .* 16.00 GiB of"):
        PRUNING["k_obd"].require(published("LLaMA-2-7B"), torch.device("cuda"))


# --- all


@pytest.mark.parametrize("method", [name for name in STOCK if name not in TWO_OF_FOUR])
def test_with_the_whole_budget_nothing_is_removed(method, pruned_of):
    dense, before, figures, _ = pruned_of(method, removing=0)
    assert figures["removed"] == 0
    assert all(torch.equal(before[name], p) for name, p in weights_of(dense).items())


@pytest.mark.parametrize("method", STOCK)
def test_what_is_stored_is_the_model_in_memory_and_repeats(method, pruned_of, tokens_BT):
    dense, _, figures, folder = pruned_of(method, dtype="bfloat16")
    stock = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert stock.dtype == torch.bfloat16
    with torch.no_grad():
        found, expected = stock.float()(tokens_BT).logits, dense.model(tokens_BT).logits
    assert (found - expected).norm() < 0.02 * expected.norm()
    generated = stock.generate(tokens_BT[:1, :4], max_new_tokens=4, do_sample=False)
    assert generated.shape == (1, 8)
    _, _, again, other = pruned_of(method, dtype="bfloat16")
    assert again["plan"] == figures["plan"]
    for file in folder.glob("*.safetensors"):
        assert file.read_bytes() == (other / file.name).read_bytes()


def test_pruned_models_are_rows_beside_conversions_and_are_made_once(
    tiny_dense, text_file, heldout_file, tmp_path, command, monkeypatch
):
    out, model = tmp_path / "compared", tiny_dense("llama")
    options = TINY_CONVERT | {"data": text_file, "eval_text": heldout_file, "active_experts": 6}
    for trained in ("steps", "lr", "checkpoint_every"):
        del options[trained]
    methods = ("magnitude_2_4", "slicegpt", "disp_llm", "shortgpt", "k_obd")  # one of each kind
    options |= {"methods": ["random_split", *methods], "seeds": [0, 1], "mask_steps": 2}
    monkeypatch.setattr(by_curvature, "SHOTS", 1)
    result = command("compare", model, out, **options)
    assert result.status == 0
    made = json.loads((out / "compare.json").read_text())["rows"]
    table, rows = (out / "compare.md").read_text(), {row["run"]: row for row in made}
    assert len(rows) == len(made) == 1 + 2 * 2 + len(methods) + 1
    budget = rows["random_split-own-seed0"]["parameters"]
    for method in methods:
        is_trained = PRUNING[method].is_trained
        name = method + "-seed1" * is_trained
        row, folder = rows[name], out / name
        figures = json.loads((folder / "4_prune/pruning.json").read_text())
        assert row.items() >= figures.items()
        assert row["over_budget"] == row["parameters"] / budget - 1
        tokens = 2 * 2 * 32 if is_trained else TINY_CONVERT["calibration_tokens"]
        assert row["calibration_tokens"] == row["text_tokens"] == tokens
        assert 0 <= row["seconds"] < 100
        assert f"| {method} | {'masks trained' if is_trained else '-'} |" in table
        assert row["loss_above_dense"] == row["loss"] - rows["dense"]["loss"]
        if method not in STOCK:
            assert row["loss"] != rows["dense"]["loss"]
            continue
        stock = AutoModelForCausalLM.from_pretrained(folder / "4_prune/model")
        tokens_BT = load_file(folder / "0_data/heldout.safetensors")["tokens"].long()
        with torch.no_grad():
            loss = float(stock(tokens_BT, labels=tokens_BT).loss)
        assert row["loss"] == pytest.approx(loss, abs=1e-5)
    evaluated = command("evaluate", out / "magnitude_2_4", text=heldout_file, max_tokens=64)
    assert evaluated.status == 0
    assert "matched" in table

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    assert command("compare", model, out, **options).status == 0
    assert json.loads((out / "compare.json").read_text())["rows"] == made
    assert "was pruned" in command("report", out / "magnitude_2_4").refusal()
    assert "no run with a finished" in command("analyse", out / "magnitude_2_4").refusal()
