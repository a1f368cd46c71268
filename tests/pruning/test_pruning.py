"""Methods that prune: each against its definition written out serially, and as rows of a table."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from dotmoe.models.dense import DenseModel
from dotmoe.models.family import family_of
from dotmoe.parameters import meta_model
from dotmoe.pruning import PRUNING, PruneInputs, prune, sparsegpt
from dotmoe.pruning.llm_pruner import removed_parameters
from dotmoe.pruning.slicegpt import sliced, sliced_parameters
from dotmoe.pruning.two_of_four import kept_of_four
from runs import TINY_CONVERT

LAYERS = ("shortgpt", "sleb")
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
    seen = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda _, args, name=name: seen.update({name: args[0].flatten(0, 1).double().numpy()})
        )
        for name, module in linears_of(dense).items()
    ]
    dense.model(input_ids=tokens_BT)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.fixture
def pruned_of(dense_of, tokens_BT, tmp_path):
    """A method's figures, the model as it was and as it is in memory."""

    def make(method, family="llama", wanted=0, **options):
        dense = dense_of(family, **options)
        before = weights_of(dense)
        folder = tmp_path / f"{method}-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        inputs = PruneInputs(dense=dense, tokens_BT=tokens_BT, wanted=wanted)
        figures = prune(method, inputs, folder)
        return dense, before, figures, folder / "model"

    return make


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
    dense, before, figures, folder = pruned_of(method, family)
    stored = load_file(next(folder.glob("*00001-of*"))) | load_file(next(folder.glob("*2-of*")))
    pruned = {f"{name}.weight" for name in linears_of(dense)}
    for name, weight in weights_of(dense).items():
        if name in pruned:
            zeros = (weight == 0).view(len(weight), -1, 4).sum(-1)
            assert (zeros == 2).all()
            assert name not in stored or torch.equal(stored[name], weight)
        else:
            assert torch.equal(weight, before[name])
    total, halved = sum(map(torch.numel, before.values())), sum(before[n].numel() for n in pruned)
    assert figures["parameters"] == total - halved // 2


def test_wanda_keeps_what_the_serial_definition_keeps_layer_by_layer(pruned_of, tokens_BT):
    dense, before, *_ = pruned_of("wanda_2_4", "qwen2")
    now = weights_of(dense)
    for layer in range(2):  # the stock model as it was when this layer's turn came
        for name, p in dense.model.named_parameters():
            is_pruned = f".layers.{layer - 1}." in name
            p.data = (now if is_pruned else before)[name].clone()
        for name, x_TI in inputs_of(dense, tokens_BT).items():
            if f".layers.{layer}." not in name:
                continue
            weight, norm_I = before[f"{name}.weight"].double().numpy(), np.sqrt((x_TI**2).sum(0))
            for row, found in zip(weight, now[f"{name}.weight"].numpy(), strict=True):
                expected = row.copy()
                for start in range(0, len(row), 4):
                    four = range(start, start + 4)
                    for i in sorted(four, key=lambda i: abs(row[i]) * norm_I[i])[:2]:
                        expected[i] = 0
                assert np.array_equal(found, expected.astype(np.float32))


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
        kept = linear.weight.numpy() != 0
        for row in range(len(weight)):
            for start in range(0, weight.shape[1], 4):
                fours = score[row, start : start + 4]
                gone = ~kept[row, start : start + 4]
                assert fours[gone].max() <= fours[~gone].min() * (1 + 1e-3)
    assert not any(p.requires_grad or p.grad is not None for p in found.model.parameters())


def serial_obs(weight_OI, x_TI):
    """Optimal brain surgeon one row and one column at a time, on the inverse Hessian itself."""
    hessian = x_TI.T @ x_TI
    size = len(hessian)
    hessian[np.arange(size), np.arange(size)] += 0.01 * np.trace(hessian) / size
    expected = weight_OI.copy()
    for row in expected:
        inverse = np.linalg.inv(hessian)
        for j in range(size):
            if j % 4 == 0:  # U_jj^2 = [H_F^-1]_jj with F the features from j on
                scale = [np.linalg.inv(hessian[i:, i:])[0, 0] for i in range(j, j + 4)]
                order = sorted(range(4), key=lambda i: row[j + i] ** 2 / scale[i])
            if j % 4 in order[:2]:
                row -= row[j] / inverse[j, j] * inverse[:, j]
            inverse -= np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
            inverse[j], inverse[:, j] = 0, 0
            inverse[j, j] = 1  # never read again
        row[np.abs(row) < 1e-12] = 0
    return expected


@pytest.fixture
def correlated():
    """Weights [O, I] and correlated inputs [T, I] of one linear map, float64."""
    generator = torch.Generator().manual_seed(7)
    mixing, noise = (torch.randn(*size, generator=generator) for size in ((6, 16), (40, 16)))
    x_TI = torch.randn(40, 6, generator=generator) @ mixing + 0.3 * noise
    return torch.randn(5, 16, generator=generator).double(), x_TI.double()


@pytest.mark.parametrize("columns", [4, 8, 128])
def test_sparsegpt_is_the_surgeon_column_by_column(columns, correlated, monkeypatch):
    monkeypatch.setattr(sparsegpt, "_COLUMNS_AT_ONCE", columns)
    weight_OI, x_TI = correlated
    found = sparsegpt._corrected(weight_OI, sparsegpt._curvature(x_TI.T @ x_TI))
    np.testing.assert_allclose(found, serial_obs(weight_OI.numpy(), x_TI.numpy()), atol=1e-9)


def test_a_feature_that_is_never_read_is_pruned_first(correlated):
    weight_OI, x_TI = correlated
    x_TI[:, 5] = 0
    found = sparsegpt._corrected(100 * weight_OI, sparsegpt._curvature(x_TI.T @ x_TI))
    assert not found[:, 5].any()


def test_sparsegpt_reconstructs_better_than_wanda_and_wanda_better_than_magnitude(
    pruned_of, tokens_BT
):
    error = {}
    for method in TWO_OF_FOUR:
        dense, before, *_ = pruned_of(method)
        now, error[method] = weights_of(dense), 0
        for name, p in dense.model.named_parameters():
            p.data = before[name]
        for name, x_TI in inputs_of(dense, tokens_BT).items():
            if ".layers.0." in name:  # whose inputs are the same for all
                change = (before[f"{name}.weight"] - now[f"{name}.weight"]).double().numpy()
                error[method] += np.square(x_TI @ change.T).sum()
    assert 1.2 * error["sparsegpt_2_4"] < error["wanda_2_4"] < error["magnitude_2_4"]


def test_widths_that_are_no_fours_are_refused(dense_of, tokens_BT, tmp_path):
    dense = dense_of("llama", intermediate_size=90)
    before = weights_of(dense)
    with pytest.raises(Exception, match="reads 90 features, which are not whole fours"):
        prune("wanda_2_4", PruneInputs(dense=dense, tokens_BT=tokens_BT, wanted=0), tmp_path)
    assert all(torch.equal(before[name], p) for name, p in weights_of(dense).items())


# --- whole layers


def share_of(dense, dropped):
    """A budget that asks for so many layers less, a little more or less."""
    layer = sum(p.numel() for p in dense.model.model.layers[0].parameters())
    return sum(p.numel() for p in dense.model.parameters()) - int((dropped + 0.3) * layer)


@torch.no_grad()
def loss_of(dense, tokens_BT, layers):
    """Mean next-token loss of a stock model with some of the layers of a dense one."""
    config = copy.deepcopy(dense.config)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in layers]
    model = AutoModelForCausalLM.from_config(config).eval()
    for new, old in enumerate(layers):
        model.model.layers[new].load_state_dict(dense.model.model.layers[old].state_dict())
    for part in ("embed_tokens", "norm"):
        own = getattr(model.model, part)
        own.load_state_dict(getattr(dense.model.model, part).state_dict())
    model.lm_head.load_state_dict(dense.model.lm_head.state_dict())
    return float(model(tokens_BT, labels=tokens_BT).loss)


@pytest.mark.parametrize("method", LAYERS)
@pytest.mark.parametrize("family", ["qwen2", "granite"])
def test_dropped_layers_are_in_neither_config_nor_weights(
    method, family, dense_of, pruned_of, tokens_BT
):
    options = {"num_hidden_layers": 5}
    if family == "qwen2":
        types = ["full_attention", "sliding_attention"] * 2 + ["full_attention"]
        options |= {"layer_types": types, "use_sliding_window": True, "sliding_window": 32}
    dense = dense_of(family, **options)
    dropped, before, figures, folder = pruned_of(
        method, family, wanted=share_of(dense, 2), **options
    )
    gone = figures["plan"]["layers"]
    kept = [layer for layer in range(5) if layer not in gone]
    assert (len(gone), len(kept)) == (2, 3)
    config = json.loads((folder / "config.json").read_text())
    assert config["num_hidden_layers"] == 3
    if family == "qwen2":
        assert config["layer_types"] == [types[layer] for layer in kept]
    stored = {name for file in folder.glob("*.safetensors") for name in load_file(file)}
    assert not [name for name in stored if ".layers.3." in name]
    one = sum(p.numel() for p in dense.model.model.layers[0].parameters())
    assert figures["parameters"] == sum(map(torch.numel, before.values())) - 2 * one
    stock = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert stock.num_parameters() == figures["parameters"]
    with torch.no_grad():
        loss = float(stock(tokens_BT, labels=tokens_BT).loss)
    assert loss == pytest.approx(loss_of(dense, tokens_BT, kept), abs=1e-5)
    assert dropped.widths.layers == 3


def test_shortgpt_drops_the_layers_of_least_turn(dense_of, pruned_of, tokens_BT):
    dense = dense_of("llama", num_hidden_layers=5)
    stream, scores = [], []
    hooks = [
        layer.register_forward_hook(lambda _, args, out: stream.append((args[0], out)))
        for layer in dense.model.model.layers
    ]
    with torch.no_grad():
        dense.model(tokens_BT)
    for hook in hooks:
        hook.remove()
    for before, after in stream:
        x, y = (each.flatten(0, 1).double().numpy() for each in (before, after))
        cosine = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(x, y, strict=True)]
        scores.append(1 - np.mean(cosine))
    for number in (1, 3):
        *_, figures, _ = pruned_of("shortgpt", num_hidden_layers=5, wanted=share_of(dense, number))
        assert figures["plan"]["layers"] == list(np.argsort(scores)[:number])


def test_sleb_drops_what_costs_least_each_time_and_neither_end(dense_of, pruned_of, tokens_BT):
    dense, left = dense_of("llama", num_hidden_layers=5), list(range(5))
    *_, figures, _ = pruned_of("sleb", num_hidden_layers=5, wanted=0)
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
    trunk, head, size = dense.model.model, dense.model.lm_head, dense.config.hidden_size
    places, last = [each.double() for each in axes_SDK], torch.eye(size).double()

    def cut(linear, rows, columns):
        module = nn.Linear(columns.shape[1], rows.shape[1], bias=linear.bias is not None).double()
        module.weight.data = rows.T @ linear.weight.double() @ columns
        if linear.bias is not None:
            module.bias.data = linear.bias.double()
        return module

    def reading(linear, norm, axes):  # with the norm folded in
        return cut(linear, torch.eye(linear.out_features).double(), norm.weight[:, None] * axes)

    def writing(linear, axes):
        return cut(linear, axes, torch.eye(linear.in_features).double())

    def normed(x):
        eps = dense.config.rms_norm_eps
        return x / (x.square().sum(-1, keepdim=True) / size + eps).sqrt()

    positions = torch.arange(tokens_BT.shape[1])[None]
    rotary = [each.double() for each in trunk.rotary_emb(places[0], positions)]
    now = places[0]
    x = trunk.embed_tokens(tokens_BT).double() @ now
    for index, layer in enumerate(trunk.layers):
        middle = places[2 * index + 1]
        after = places[2 * index + 2] if 2 * index + 2 < len(places) else last
        attention, mlp = copy.deepcopy(layer.self_attn).double(), copy.deepcopy(layer.mlp).double()
        for name in ("q_proj", "k_proj", "v_proj"):
            linear = getattr(layer.self_attn, name)
            setattr(attention, name, reading(linear, layer.input_layernorm, now))
        attention.o_proj = writing(layer.self_attn.o_proj, middle)
        for name in ("gate_proj", "up_proj"):
            linear = getattr(layer.mlp, name)
            setattr(mlp, name, reading(linear, layer.post_attention_layernorm, middle))
        mlp.down_proj = writing(layer.mlp.down_proj, after)
        added = attention(normed(x), position_embeddings=rotary, attention_mask=None)[0]
        x = x @ (now.T @ middle) + added
        x = x @ (middle.T @ after) + mlp(normed(x))
        now = after
    return normed(x) @ reading(head, trunk.norm, last).weight.T


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_projected_model_is_the_really_sliced_one(family, pruned_of, tokens_BT):
    options = {"num_hidden_layers": 3}
    dense, before, figures, folder = pruned_of("slicegpt", family, wanted=130_000, **options)
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
    dense, _, figures, folder = pruned_of("slicegpt", wanted=10**9)
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


def described(*sizes):
    """A model without weights of the sizes of a published one."""
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    keys += ("num_key_value_heads", "vocab_size")
    config = AutoConfig.for_model(sizes[-1], **dict(zip(keys, sizes, strict=False)))
    return DenseModel(
        model=meta_model(config),
        tokenizer=None,
        family=family_of(config),
        folder=Path(),
        source="",
        revision=None,
    )


LLAMA_2_7B = (4096, 11008, 32, 32, 32, 32000, "llama")
LLAMA_3_8B = (4096, 14336, 32, 32, 8, 128256, "llama")
QWEN_7B = (3584, 18944, 28, 28, 4, 152064, "qwen2")


@pytest.mark.parametrize(
    ("sizes", "width", "billions"),
    [(LLAMA_2_7B, 2048, 3.7298), (LLAMA_3_8B, 1720, 3.9042), (QWEN_7B, 2000, 4.7478)],
)
def test_sliced_parameters_are_those_of_the_published_settings(sizes, width, billions):
    assert round(sliced_parameters(described(*sizes), width) / 1e9, 4) == billions


# --- groups


def test_a_quarter_of_the_groups_of_llama_3_8b_is_the_published_count():
    dense = described(*LLAMA_3_8B)
    total = sum(p.numel() for p in dense.model.parameters())
    assert total - removed_parameters(dense, 14336 // 4) == 6_612_586_496


def scores_of(dense, tokens_BT, layer):
    """Summed |w dL/dw| of the heads and of the neurons of a layer, one weight after the other."""
    model = dense.model.requires_grad_(True)
    model(tokens_BT, labels=tokens_BT).loss.backward()
    config, size = dense.config, dense.config.hidden_size // dense.config.num_attention_heads
    heads, neurons = np.zeros(config.num_key_value_heads), np.zeros(config.intermediate_size)
    shared = config.num_attention_heads // config.num_key_value_heads
    for name, p in model.model.layers[layer].named_parameters():
        if p.dim() < 2:
            continue
        worth = (p * p.grad).abs().detach().double().numpy()
        worth = worth.T if "o_proj" in name or "down_proj" in name else worth
        for row, value in enumerate(worth.sum(1)):
            if "mlp" in name:
                neurons[row] += value
            else:
                query = "q_proj" in name or "o_proj" in name
                heads[row // size // (shared if query else 1)] += value
    return heads, neurons


@torch.no_grad()
def really_cut(dense, heads, neurons):
    """The stock modules with only some key-value heads and neurons in each layer."""
    model, config = copy.deepcopy(dense.model), dense.config
    size = config.hidden_size // config.num_attention_heads
    shared = config.num_attention_heads // config.num_key_value_heads

    def kept_of(linear, rows, dimension):
        kept = torch.tensor(rows)
        linear.weight.data = linear.weight.data.index_select(dimension, kept)
        if dimension == 0 and linear.bias is not None:
            linear.bias.data = linear.bias.data[kept]

    for index, layer in enumerate(model.model.layers):
        keys = [head * size + i for head in heads[index] for i in range(size)]
        width = shared * size
        queries = [head * width + i for head in heads[index] for i in range(width)]
        for name, rows, dimension in (
            *(("q_proj", queries, 0), ("k_proj", keys, 0)),
            *(("v_proj", keys, 0), ("o_proj", queries, 1)),
        ):
            kept_of(getattr(layer.self_attn, name), rows, dimension)
        for name, dimension in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
            kept_of(getattr(layer.mlp, name), neurons[index], dimension)
    return model


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_llm_pruner_is_the_model_without_its_least_important_groups(
    family, dense_of, pruned_of, tokens_BT
):
    options = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 3}
    dense = dense_of(family, **options)
    total = sum(p.numel() for p in dense.model.parameters())
    found, _, figures, folder = pruned_of(
        "llm_pruner", family, wanted=total - removed_parameters(dense, 40), **options
    )
    assert figures["plan"] == {"heads": 2, "neurons": 56, "layers": [0, 3]}
    heads, neurons = [], []
    for layer in range(3):
        dense.model.zero_grad()
        by_head, by_neuron = scores_of(dense, tokens_BT, layer)
        heads.append(sorted(np.argsort(by_head)[2:].tolist()))
        neurons.append(sorted(np.argsort(by_neuron)[40:].tolist()))
    cut = really_cut(dense, heads, neurons)
    assert sum(p.numel() for p in cut.parameters()) == figures["parameters"]
    with torch.no_grad():
        expected = cut(tokens_BT).logits
        assert (found.model(tokens_BT).logits - expected).norm() < 1e-5 * expected.norm()
    assert not any(p.requires_grad or p.grad is not None for p in found.model.parameters())
    stored = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert torch.equal(
        stored.model.layers[1].mlp.down_proj.weight,
        found.model.model.layers[1].mlp.down_proj.weight,
    )


def test_llm_pruner_finds_the_parts_of_fused_projections(pruned_of):
    dense, *_ = pruned_of("llm_pruner", "phi3", wanted=0)
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


# --- all


@pytest.mark.parametrize("method", [name for name in STOCK if name not in TWO_OF_FOUR])
def test_with_the_whole_budget_nothing_is_removed(method, dense_of, pruned_of):
    whole = sum(p.numel() for p in dense_of("llama").model.parameters())
    dense, before, figures, _ = pruned_of(method, wanted=whole)
    assert figures["parameters"] == figures["stored"] == whole
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
    tiny_dense, text_file, tmp_path, command, monkeypatch
):
    held, out, model = tmp_path / "held.txt", tmp_path / "compared", tiny_dense("llama")
    held.write_text("\n".join(f"Line {i}: the hen ate {i * 7 % 13} figs." for i in range(100)))
    options = TINY_CONVERT | {"data": text_file, "eval_text": held, "active_experts": 6}
    del options["steps"]
    options |= {"methods": ["random_split", *PRUNING], "seeds": [0, 1]}
    assert command("compare", model, out, **options).status == 0
    summary = json.loads((out / "compare.json").read_text())
    table = (out / "compare.md").read_text()
    rows = {row["run"]: row for row in summary["rows"]}
    assert len(rows) == len(summary["rows"]) == 1 + 2 * 2 + len(PRUNING)
    budget = rows["random_split-own-seed0"]["parameters"]
    for method in PRUNING:
        row = rows[method]
        figures = json.loads((out / method / "4_prune/pruning.json").read_text())
        assert row.items() >= figures.items()
        assert row["over_budget"] == row["parameters"] / budget - 1
        assert row["calibration_tokens"] == TINY_CONVERT["calibration_tokens"]
        assert 0 <= row["seconds"] < 100
        assert f"| {method} | - | - |" in table
        assert row["loss_above_dense"] == row["loss"] - rows["dense"]["loss"]
        if method not in STOCK:
            assert row["loss"] != rows["dense"]["loss"]
            continue
        stock = AutoModelForCausalLM.from_pretrained(out / method / "4_prune/model")
        tokens_BT = load_file(out / method / "0_data/heldout.safetensors")["tokens"].long()
        with torch.no_grad():
            loss = float(stock(tokens_BT, labels=tokens_BT).loss)
        assert row["loss"] == pytest.approx(loss, abs=1e-5)
    assert command("evaluate", out / "magnitude_2_4", text=held, max_tokens=64).status == 0
    assert "matched" in table

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    assert command("compare", model, out, **options).status == 0
    assert json.loads((out / "compare.json").read_text())["rows"] == summary["rows"]
    assert "was pruned" in command("report", out / "magnitude_2_4").refusal()
    assert "no run with a finished" in command("analyse", out / "magnitude_2_4").refusal()
