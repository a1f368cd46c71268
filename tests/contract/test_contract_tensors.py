"""Every tensor of an export, for each family and format, from experts that are always the same.

Oracles: SHA-256 of the tensors written by the code at commit 3ab54ca, and slices of the dense
weights. Router rows are drawn from a normal distribution, whose last bits depend on the CPU: they
are compared with the layout of the run, from which they may differ by a power of two.
"""

import hashlib
import json

import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file

from dotmoe.cli import run
from runs import FORMATS_OF, slow_but, weights_of

GGUF = {
    "llama": ("gguf_glm4moe", "gguf_llama", "gguf_dense"),
    "mistral": ("gguf_llama", "gguf_dense"),
    "qwen2": ("gguf_glm4moe", "gguf_dense"),
    "qwen3": ("gguf_glm4moe", "gguf_dense"),
}
EXPERTS, WIDTH = 6, 64


def digest(content):
    return hashlib.sha256(content).hexdigest()[:16]


def is_router(weight):
    return tuple(weight.shape) == (EXPERTS, WIDTH)


def described(weight):
    """Dtype, shape and SHA-256 of a tensor; a router's values are looked at elsewhere."""
    dtype = str(weight.dtype).removeprefix("torch.")
    content = weight.contiguous().view(torch.uint8).numpy().tobytes()
    return f"{dtype} {list(weight.shape)} {'router' if is_router(weight) else digest(content)}"


def require_routers_of(layout, weights):
    """Each layer's router is that of the layout, but for a power of two and the export's dtype."""
    routers = [weights[name] for name in sorted(weights) if is_router(weights[name])]
    expected = layout["router"][len(layout["router"]) - len(routers) :]
    assert routers
    for router, rows in zip(routers, expected, strict=True):
        ratio = (router.double() / rows.to(router.dtype).double()).unique()
        assert len(ratio) == 1
        assert float(ratio.log2()) == round(float(ratio.log2()))


def export(made, out, *options):
    assert run(["export", str(made), str(out), *options]) == 0
    return weights_of(out)


@pytest.mark.parametrize("family", slow_but([*FORMATS_OF.keys() - {"mistral"}], FORMATS_OF))
def test_tensors_of_each_family_in_each_format(family, fixed_run, golden, tmp_path):
    made = fixed_run(family)
    layout = load_file(made / "3_extract/layout.safetensors")
    found = {}
    for name in FORMATS_OF[family]:
        weights = export(made, tmp_path / name, "--format", name)
        require_routers_of(layout, weights)
        found[name] = {tensor: described(weight) for tensor, weight in weights.items()}
    assert found == golden(f"tensors_{family}", found)
    auto = weights_of(made / "5_export")
    assert {name: described(weight) for name, weight in auto.items()} == found[
        FORMATS_OF[family][0]
    ]


VARIANTS = {
    "bfloat16": {"export_dtype": "bfloat16"},
    "first_layer_dense": {"first_dense_layers": 1},
    "tied": {"model_options": {"tied": True}},
    "two_files": {"max_shard_gib": 0.0002},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_tensors_in_another_dtype_with_a_dense_layer_tied_or_in_several_files(
    variant, fixed_run, golden
):
    made = fixed_run("llama", **VARIANTS[variant])
    weights = weights_of(made / "5_export")
    require_routers_of(load_file(made / "3_extract/layout.safetensors"), weights)
    found = {name: described(weight) for name, weight in weights.items()}
    assert found == golden(f"tensors_{variant}", found)
    files = sorted(path.name for path in (made / "5_export").glob("*.safetensors"))
    assert (len(files) > 1) == (variant == "two_files")


@pytest.mark.parametrize("k", [1, 6])
def test_another_k_changes_the_config_alone(k, fixed_run, tmp_path):
    made = fixed_run("llama")
    weights = export(made, tmp_path / "out", "--active-experts", str(k))
    before = weights_of(made / "5_export")
    assert {n: described(w) for n, w in weights.items()} == {
        n: described(w) for n, w in before.items()
    }
    assert json.loads((tmp_path / "out/config.json").read_text())["num_experts_per_tok"] == k


def gguf_contents(path):
    """Metadata and tensors of a GGUF, long values as digests."""
    reader = GGUFReader(path)
    keys = {}
    for name, field in reader.fields.items():
        content = json.dumps(field.contents())
        keys[name] = content if len(content) < 100 else digest(content.encode())
    tensors = {}
    for tensor in reader.tensors:
        values = "router" if "ffn_gate_inp" in tensor.name else digest(tensor.data.tobytes())
        shape = [int(size) for size in tensor.shape]
        tensors[tensor.name] = f"{tensor.tensor_type.name} {shape} {values}"
    return {"keys": keys, "tensors": tensors}


@pytest.mark.parametrize("family", GGUF)
def test_keys_and_tensors_of_each_gguf(family, fixed_run, golden, tmp_path):
    made = fixed_run(family)
    found = {}
    for name in GGUF[family]:
        export(made, tmp_path / name, "--format", name)
        (path,) = (tmp_path / name).glob("*.gguf")
        found[name] = gguf_contents(path)
    assert found == golden(f"gguf_{family}", found)


@pytest.mark.parametrize("number_format", ["f32", "bf16", "q8_0", "q4_0"])
def test_tensors_of_a_gguf_in_each_number_format(number_format, fixed_run, golden, tmp_path):
    made = fixed_run("llama", expert_size=32, active_experts=2)
    export(made, tmp_path / "out", "--format", "gguf_llama", "--gguf-type", number_format)
    (path,) = (tmp_path / "out").glob("*.gguf")
    found = gguf_contents(path)["tensors"]
    assert found == golden(f"gguf_{number_format}", found)
