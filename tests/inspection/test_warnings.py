import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from inspected_models import inspection, tiny
from transformers import GraniteConfig, LlamaConfig, MistralConfig, Olmo2Config, Qwen2Config

from dotmoe.export.gguf_format import GGUF_FORMATS
from dotmoe.export.gguf_limits import room_in_llama_cpp
from dotmoe.method.granularity import Granularity, from_record
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.family import family_of
from dotmoe.models.meta_model import meta_model
from runs import FORMATS_OF, FORMATS_OF_KIN, LLAMA3_ROPE, loaded


def silent(kind=LlamaConfig, **changes):
    """A model that nothing is to be said about, with experts of 64 neurons."""
    return tiny(kind, **{"num_hidden_layers": 1, "intermediate_size": 1_024, **changes})


NARROW = {"num_attention_heads": 2, "num_key_value_heads": 1}
SLIDING = {"sliding_window": 128}


@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        (silent(), {}, None),
        (silent(), {"expert_size": 32}, "not a multiple of 64"),
        (silent(MistralConfig, **SLIDING), {}, None),
        (
            silent(MistralConfig, **SLIDING),
            {"shared": 0.0625},
            "is lowered from 2,048 to 128. With --shared 0",
        ),
        (silent(MistralConfig, sliding_window=2_048), {}, None),
        (silent(Qwen2Config, use_sliding_window=False), {}, None),
        (silent(hidden_size=68, **NARROW), {}, "refuses this: The model width is 68, .*of 8 only"),
        (silent(hidden_size=68, **NARROW), {"stored": torch.float32}, None),
        (silent(GraniteConfig, residual_multiplier=0.5), {"shared": 0.0625}, "refuses this: any"),
        (
            silent(),
            {"stored": torch.float16},
            "float16 .* as float32 .exact.*bfloat16 rounds",
        ),
        (silent(), {"stored": torch.float64}, "stored as float64.*or float32"),
        (silent(), {"stored": torch.float16, "export_dtype": "bfloat16"}, None),
        (silent(), {"stored": torch.float16, "export_dtype": "float32"}, None),
        (silent(), {"stored": torch.float32}, None),
    ],
)
def test_warnings_appear_exactly_when_they_should(config, options, said):
    warnings = inspection(config, **{"expert_size": 64, **options})["warnings"]
    assert len(warnings) == (said is not None)
    assert said is None or re.search(said, warnings[0])


def test_servers_limits_are_those_of_the_format_and_the_split():
    small, large = ({"expert_size": size, "active_experts": 2} for size in (64, 1_024))
    model = silent(intermediate_size=4_096)
    assert any("multiple of 128" in limit for limit in inspection(model, **small)["limits"])
    assert not any("multiple of 128" in limit for limit in inspection(model, **large)["limits"])
    assert inspection(model, targets="attention", **large)["limits"] == []
    olmo = tiny(Olmo2Config)
    assert inspection(olmo, expert_size=64)["limits"] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_expert_sizes_that_the_grouped_product_cannot_run_are_warned_of(dtype):
    ends = torch.tensor([2, 4], dtype=torch.int32)
    for size in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48):
        record = inspection(tiny(intermediate_size=96), stored=dtype, expert_size=size)
        weights = torch.ones(2, size, size, dtype=dtype)
        try:
            torch.nn.functional.grouped_mm(torch.ones(4, size, dtype=dtype), weights, offs=ends)
            runs = True
        except RuntimeError:
            runs = False
        refused = any("refuses this: expert_size" in warning for warning in record["warnings"])
        assert refused != runs


@pytest.mark.parametrize("scaling", [{}, LLAMA3_ROPE])
def test_inspect_warns_of_exactly_the_k_that_no_gguf_takes(scaling, tiny_dense):
    folder = tiny_dense("llama", num_hidden_layers=12, intermediate_size=160, **scaling)
    dense = loaded(folder)
    refused = []
    for active in (1, 16, 17, 28, 29):  # around the limits of both formats
        found = inspection(dense.config, stored=torch.float32, experts=40, active_experts=active)
        splits = from_record(found["granularity"])
        reasons = [form.unsupported(dense, splits, torch.float32) for form in GGUF_FORMATS[:2]]
        refused.append(None not in reasons)
        assert any("llama.cpp runs at most" in said for said in found["warnings"]) is refused[-1]
    assert 0 < sum(refused) < 5


# Model width, FFN width, layers, heads, heads of keys.
LLAMA_2_7B = (LlamaConfig, 4_096, 11_008, 32, 32, 32)
LLAMA_3_8B = (LlamaConfig, 4_096, 14_336, 32, 32, 8)
LLAMA_3_70B = (LlamaConfig, 8_192, 28_672, 80, 64, 8)
QWEN_7B = (Qwen2Config, 3_584, 18_944, 28, 28, 4)
QWEN_05B = (Qwen2Config, 896, 4_864, 24, 14, 2)


def without_weights(kind, width, ffn, layers, heads, kv_heads):
    """A dense model of this shape, with a small vocabulary."""
    config = tiny(
        kind,
        hidden_size=width,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=width // heads,
    )
    model, family = meta_model(config), family_of(config)
    return DenseModel(model=model, weights="meta", family=family, folder=Path(), source="it")


@pytest.mark.parametrize(
    ("shape", "size"),
    [(LLAMA_2_7B, 256), (LLAMA_3_8B, 256), (LLAMA_3_70B, 448), (QWEN_7B, 256), (QWEN_05B, 128)],
)
def test_default_experts_are_as_large_as_llama_cpp_needs_them_and_no_larger(shape, size):
    dense, bfloat16 = without_weights(*shape), torch.bfloat16

    def made(**options):
        """The size of experts, and whether a GGUF format holds them."""
        found = inspection(dense.config, stored=bfloat16, **options)
        splits = from_record(found["granularity"])
        reasons = [form.unsupported(dense, splits, bfloat16) for form in GGUF_FORMATS[:2]]
        is_warned = any("llama.cpp runs at most" in said for said in found["warnings"])
        assert is_warned is (None not in reasons)
        return splits[0].expert_size, None in reasons

    assert made(active=None, shared=None) == (size, True)
    assert made(active=0.75, shared=None) == (size, True)
    assert made(active=0.75, shared=None, expert_size=128) == (128, size == 128)
    assert made(active=0.25, shared=0.0, first_dense_layers=0)[0] == 128  # as the paper


@pytest.mark.parametrize("shape", [LLAMA_2_7B, LLAMA_3_8B, LLAMA_3_70B])
def test_with_the_options_advised_for_llama_cpp_a_gguf_holds_the_model(shape):
    dense = without_weights(*shape)
    dense.config.rope_parameters = dict(LLAMA3_ROPE["rope_parameters"])
    found = inspection(dense.config, active=0.75, shared=None)
    (said,) = [each for each in found["warnings"] if "llama.cpp" in each]
    words = re.findall(r"--([a-z-]+) ([0-9.]+)", said)
    advised = {name.replace("-", "_"): float(value) for name, value in words}
    assert advised["shared"] == advised["first_dense_layers"] == 0
    whole = {name: int(value) for name, value in advised.items() if name != "shared"}
    better = inspection(dense.config, active=0.75, shared=0.0, **whole)
    assert not [each for each in better["warnings"] if "llama.cpp" in each]
    splits = from_record(better["granularity"])
    assert None in [form.unsupported(dense, splits, torch.bfloat16) for form in GGUF_FORMATS[:2]]


@pytest.mark.parametrize("family", [*FORMATS_OF, *FORMATS_OF_KIN, "gemma2", "glm4", "lfm2"])
@pytest.mark.parametrize("changes", [{}, {"shared_size": 8}, {"first_dense_layers": 1}])
def test_whether_a_gguf_holds_a_model_is_known_without_the_package(family, changes, tiny_dense):
    dense = loaded(tiny_dense(family))
    plain = Granularity(num_experts=4, expert_size=8, active_experts=1)
    splits = (replace(plain, **changes),)
    reasons = [form.unsupported(dense, splits, torch.float32) for form in GGUF_FORMATS[:2]]
    assert (room_in_llama_cpp(dense, splits) > 0) is (None in reasons)
