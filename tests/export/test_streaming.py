"""Weights that stay on disk: the same numbers, one part in memory, sizes known beforehand."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from dotmoe.artifacts import DenseModel
from dotmoe.errors import UserError
from dotmoe.export import (
    ExportConfig,
    VerificationError,
    VerifyConfig,
    export,
    output_named,
    verify,
    weights_on_disk,
)
from dotmoe.export.architecture import Conversion
from dotmoe.export.shard_writer import plan_shards
from dotmoe.export.stock_loading import exported_on_disk
from dotmoe.export.weights_on_disk import is_finite, is_on_disk, on_disk, parts_of
from dotmoe.layout import ALWAYS_ON, ExpertLayout
from dotmoe.load import describe_dense
from dotmoe.models.family import FAMILIES
from dotmoe.parameters import meta_model

CPU = torch.device("cpu")
TARGETS = {
    "llama": "glm4_moe",
    "mistral": "mixtral",
    "phi3": "glm4_moe",
    "qwen2": "qwen2_moe",
    "qwen3": "qwen3_moe",
    "granite": "granitemoe",
    "olmo2": "flex_olmo",
}
"""A format for each family, and each format at least once."""


@pytest.fixture
def nothing_is_kept(monkeypatch):
    """Tiny models would stay in memory once they are read."""
    monkeypatch.setattr(weights_on_disk, "KEPT_BYTES", 0)


@pytest.fixture
def filled(monkeypatch):
    """Names of the parts in memory, by the size of the largest set that ever was there."""
    now, largest = set(), []
    part = weights_on_disk._Part
    fill, empty = part._fill, part._empty

    def count_in(self, *arguments):
        fill(self, *arguments)
        now.add((id(self), self._name))
        largest.append(len(now))

    def count_out(self, *arguments):
        empty(self, *arguments)
        now.discard((id(self), self._name))

    monkeypatch.setattr(part, "_fill", count_in)
    monkeypatch.setattr(part, "_empty", count_out)
    return largest


def logits_of(model, tokens_BT):
    with torch.no_grad():
        return model(input_ids=tokens_BT, use_cache=False).logits


def with_first_layer_dense(layout):
    assignment = layout.expert_of_neuron_LN.clone()
    assignment[0] = ALWAYS_ON
    return replace(layout, expert_of_neuron_LN=assignment)


def change(folder, name, how):
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = how(tensors[name])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", TARGETS)
def test_an_export_runs_from_disk_as_stock_transformers_runs_it(
    family, dtype, keeps, dense_of, layout_of, tokens_BT, tmp_path, monkeypatch
):
    if not keeps:
        monkeypatch.setattr(weights_on_disk, "KEPT_BYTES", 0)
    dense = dense_of(family, dtype=dtype)
    layout = layout_of(dense, dtype=getattr(torch, dtype))
    if TARGETS[family] in ("qwen2_moe", "qwen3_moe") or family == "llama":
        layout = with_first_layer_dense(layout)
    out = tmp_path / "out"
    export(dense, layout, out, ExportConfig(format=TARGETS[family]), tokens_BT)
    stock = AutoModelForCausalLM.from_pretrained(out, dtype=getattr(torch, dtype))
    ours = exported_on_disk(out, CPU, getattr(torch, dtype))
    assert type(ours) is type(stock)
    for _ in range(2):
        assert torch.equal(logits_of(ours, tokens_BT), logits_of(stock, tokens_BT))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_dense_model_runs_from_disk_as_it_runs_in_memory(
    family, dtype, tied, dense_of, tokens_BT, nothing_is_kept
):
    dense = dense_of(family, dtype=dtype, tied=tied, load_dtype=dtype)
    from_disk = on_disk(describe_dense(dense.source), CPU, "auto")
    assert is_on_disk(from_disk.model)
    assert not is_on_disk(dense.model)
    assert from_disk.device == CPU
    for _ in range(2):
        expected = logits_of(dense.model, tokens_BT)
        assert torch.equal(logits_of(from_disk.model, tokens_BT), expected)
    held = sum(parameter.untyped_storage().nbytes() for parameter in from_disk.model.parameters())
    assert held < 8 * len(list(from_disk.model.parameters()))


def test_a_tied_matrix_stored_as_the_head_is_read_for_both(dense_of, tokens_BT, nothing_is_kept):
    dense = dense_of("llama", head_only=True)
    from_disk = on_disk(describe_dense(dense.source), CPU, torch.float32)
    expected = logits_of(dense.model, tokens_BT)
    assert torch.equal(logits_of(from_disk.model, tokens_BT), expected)


@pytest.mark.gpu
def test_weights_are_streamed_to_a_gpu(dense_of, layout_of, tokens_BT, tmp_path, nothing_is_kept):
    source = dense_of("llama", dtype="bfloat16").source
    dense = on_disk(describe_dense(source), torch.device("cuda"), "auto")
    layout = layout_of(dense, dtype=torch.bfloat16)
    record = export(dense, layout, tmp_path / "out", ExportConfig(), tokens_BT)
    assert record.verification.dtype == "bfloat16"
    assert dense.device.type == "cuda"


def test_an_export_from_disk_is_byte_for_byte_the_one_from_memory(
    dense_of, layout_of, tokens_BT, tmp_path, nothing_is_kept, filled
):
    dense = dense_of("llama", dtype="bfloat16")
    layout = layout_of(dense, dtype=torch.bfloat16)
    from_disk = on_disk(describe_dense(dense.source), CPU, torch.float32)
    records = [
        export(each, layout, tmp_path / name, ExportConfig(), tokens_BT)
        for name, each in {"memory": dense, "disk": from_disk}.items()
    ]
    assert replace(records[0], name="disk") == records[1]
    for path in sorted((tmp_path / "memory").iterdir()):
        if path.suffix in (".safetensors", ".txt") or path.name == "config.json":
            assert path.read_bytes() == (tmp_path / "disk" / path.name).read_bytes(), path
    assert max(filled) == 1
    assert len(filled) > 50  # every part of every run went through the disk


def test_a_weight_that_was_not_read_is_nan_and_parts_cover_the_model(dense_of):
    dense = dense_of("llama")
    model = on_disk(dense, CPU, torch.float32).model
    assert list(parts_of(model)) == [
        "model.embed_tokens",
        "model.layers.0",
        "model.layers.1",
        "model.norm",
        "lm_head",
    ]
    in_parts = [len(list(part.parameters())) for part in parts_of(model).values()]
    assert sum(in_parts) == len(list(model.parameters()))
    output = model.get_submodule("model.layers.1.mlp")(torch.ones(1, 2, 64))
    assert bool(output.isnan().all())


@pytest.mark.parametrize(
    ("value", "expected"), [(1.0, True), (math.nan, False), (math.inf, False), (-math.inf, False)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_finite_means_every_entry(value, expected, dtype):
    tensor = torch.randn(40, 30).to(dtype)
    tensor[17, 3] = value
    assert is_finite(tensor) is expected


def test_damaged_dense_files_are_named(tiny_dense, tmp_path, tokens_BT):
    import shutil

    name = "model.layers.1.mlp.up_proj.weight"
    broken, narrow = tmp_path / "broken", tmp_path / "narrow"
    for folder in (broken, narrow):
        shutil.copytree(tiny_dense("llama"), folder)
    change(narrow, name, lambda tensor: tensor[:-8].clone())
    with pytest.raises(UserError, match=rf"{name} has shape \(88, 64\) .* asks for \(96, 64\)"):
        on_disk(describe_dense(str(narrow)), CPU, torch.float32)
    change(broken, name, lambda tensor: tensor.index_fill(0, torch.tensor([5]), math.inf))
    dense = on_disk(describe_dense(str(broken)), CPU, torch.float32)
    with pytest.raises(UserError, match=f"{name} in .* contains NaN or infinity"):
        logits_of(dense.model, tokens_BT)


@pytest.mark.parametrize(
    ("stray", "problem"),
    [
        ("model.layers.1.mlp.experts.12.up_proj.weight", "cannot load layer 1 of"),
        ("model.layers.1.mlp.extra.weight", "unexpected_keys in layer 1 of"),
        ("model.layers.7.mlp.gate.weight", "unexpected_keys in"),
        ("model.extra.weight", "unexpected_keys in"),
    ],
)
def test_a_tensor_too_many_is_found_wherever_it_is(
    stray, problem, dense_of, layout_of, tokens_BT, tmp_path
):
    dense = dense_of("llama")
    layout, out = layout_of(dense), tmp_path / "out"
    export(dense, layout, out, ExportConfig(), tokens_BT)
    tensors = load_file(out / "model.safetensors")
    tensors[stray] = torch.zeros(8, 64)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(VerificationError, match=problem):
        verify(dense, layout, out, tokens_BT, VerifyConfig(), output_named("glm4_moe"))


class SizesOnly:
    """Stands in for the files of a checkpoint: shapes from the meta device, and what is read."""

    folder = "nowhere"

    def __init__(self, model):
        self._shape_of = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self.names = set(self._shape_of)
        self.was_read = []

    def stored_name(self, name):
        return name

    def describe(self, name):
        return self._shape_of[name], torch.bfloat16

    def read(self, name):
        self.was_read.append(name)
        return torch.zeros((), dtype=torch.bfloat16).expand(self._shape_of[name])


SHAPES = {
    "Llama-2-7B": (
        "llama",
        {
            "hidden_size": 4096,
            "intermediate_size": 11_008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 32_000,
        },
        6_738_415_616,
        86,
    ),
    "Qwen2.5-7B": (
        "qwen2",
        {
            "hidden_size": 3584,
            "intermediate_size": 18_944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152_064,
        },
        7_615_616_512,
        148,
    ),
}
"""Family, config, published number of parameters, and E at 128 neurons an expert."""


@pytest.fixture(scope="module", params=SHAPES)
def seven_billion(request):
    """A conversion to glm4_moe of a 7B shape without weights."""
    family, config, parameters, num_experts = SHAPES[request.param]
    hf_config = AutoConfig.for_model(family, tie_word_embeddings=False, **config)
    model = meta_model(hf_config)
    dense = DenseModel(
        model=model,
        tokenizer=None,
        family=FAMILIES[family],
        folder=None,
        source=request.param,
        revision=None,
    )
    layers, width = hf_config.num_hidden_layers, hf_config.hidden_size
    layout = ExpertLayout(
        expert_of_neuron_LN=torch.arange(num_experts).repeat(layers, 128),
        router_LED=torch.zeros(layers, num_experts, width),
        active_experts=num_experts // 4,
    )
    conversion = Conversion(
        dense=dense,
        tensors=SizesOnly(model),
        layout=layout,
        exponents=dict.fromkeys(range(layers), 12),
        dtype=torch.bfloat16,
    )
    specs = list(output_named("glm4_moe").tensors(conversion))
    return SimpleNamespace(
        config=hf_config, layout=layout, tensors=conversion.tensors, specs=specs, dense=parameters
    )


def test_a_7b_export_has_the_bytes_of_the_model_and_what_is_added(seven_billion):
    config, layout = seven_billion.config, seven_billion.layout
    layers, width = config.num_hidden_layers, config.hidden_size
    router = layout.num_experts * width
    zero_expert = 3 * width * layout.expert_size
    expected = 2 * seven_billion.dense + layers * (2 * (router + zero_expert))
    expected += layers * 4 * layout.num_experts  # correction biases, float32
    assert sum(spec.num_bytes for spec in seven_billion.specs) == expected
    shards = plan_shards(seven_billion.specs, 4 * 2**30)
    assert len(shards) == math.ceil(expected / (4 * 2**30))


def test_a_7b_export_never_makes_more_than_one_dense_tensor(seven_billion):
    config = seven_billion.config
    largest = config.vocab_size * config.hidden_size * 2
    assert max(spec.num_bytes for spec in seven_billion.specs) == largest
    expert = 128 * config.hidden_size * 2
    ffn = [spec for spec in seven_billion.specs if ".experts." in spec.name]
    assert {spec.num_bytes for spec in ffn} == {expert}
    assert len(ffn) == 3 * config.num_hidden_layers * seven_billion.layout.num_experts


def test_a_7b_layer_is_read_once_matrix_by_matrix(seven_billion):
    seven_billion.tensors.was_read.clear()
    experts = [spec for spec in seven_billion.specs if ".layers.3.mlp.experts." in spec.name]
    for spec in experts[::16]:  # making all takes half a minute
        assert spec.make().nbytes == spec.num_bytes
    reads = seven_billion.tensors.was_read
    switches = [name for at, name in enumerate(reads) if at == 0 or reads[at - 1] != name]
    assert switches == [f"model.layers.3.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]


def test_a_7b_layout_is_small_beside_the_model(seven_billion):
    config, layout = seven_billion.config, seven_billion.layout
    layers, width = config.num_hidden_layers, config.hidden_size
    held = layout.expert_of_neuron_LN.nbytes + layout.router_LED.nbytes
    assert held == 8 * layers * config.intermediate_size + 4 * layers * layout.num_experts * width
    assert held < 0.01 * 2 * seven_billion.dense
