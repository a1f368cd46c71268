import re
from functools import partial

import pytest
import torch
from inspected_models import inspection, tiny
from transformers import LlamaConfig, MistralConfig, Qwen2Config

from dotmoe.export.architectures import FORMATS
from dotmoe.granularity import GROUPED_MATMUL_BYTES, Granularity
from dotmoe.load import LoadConfig, load_dense


def wide(experts):
    return tiny(num_hidden_layers=1, intermediate_size=64 * experts)


def silent(kind=LlamaConfig, **changes):
    """A model that nothing is to be said about, with experts of 64 neurons."""
    return tiny(kind, num_hidden_layers=1, intermediate_size=1_024, **changes)


@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        (silent(), {}, None),
        (silent(), {"expert_size": 32}, "not a multiple of 64"),
        (wide(128), {"active_experts": 32}, None),
        (wide(128), {"active_experts": 33}, "33 experts run per token"),
        (wide(512), {"active_experts": 8}, None),
        (wide(513), {"active_experts": 8}, "513 experts"),
        (silent(tie_word_embeddings=True, dtype="bfloat16"), {}, "written out: 64.00 KiB more"),
        (silent(MistralConfig, sliding_window=128), {}, "context is lowered from 2,048 to 128"),
        (silent(MistralConfig, sliding_window=2_048), {}, None),
        (silent(Qwen2Config, use_sliding_window=False), {}, None),
        (silent(), {"steps": 3_499}, "sees 458,620,928 tokens; the pa"),
        (silent(max_position_embeddings=512), {}, "shortened from 2,048 to 512 tokens"),
    ],
)
def test_warnings_appear_exactly_when_they_should(config, options, said):
    warnings = inspection(config, **{"expert_size": 64, **options})["warnings"]
    assert len(warnings) == (said is not None)
    assert said is None or said in warnings[0]


def test_warnings_add_up():
    config = tiny(tie_word_embeddings=True, intermediate_size=1_200)
    found = inspection(config, steps=10, experts=600, active_experts=150)
    assert len(found["warnings"]) == 6


def narrow(width, ffn):
    """A model of one layer whose other warnings are few."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return tiny(num_hidden_layers=1, hidden_size=width, intermediate_size=ffn, **heads)


@pytest.mark.parametrize(
    ("config", "size", "stored", "export_dtype", "words"),
    [
        (narrow(64, 96), 6, torch.float32, "source", "size 6: .*of 4 only. Give .*-size 4 or 8."),
        (narrow(64, 96), 4, torch.bfloat16, "source", "size 4: .*of 8 only. Give .*-size 8."),
        (narrow(64, 96), 12, torch.bfloat16, "source", "Give --expert-size 8 or 16."),
        (narrow(64, 96), 12, torch.float32, "bfloat16", "size 12: in bfloat16"),
        (narrow(64, 172), 4, torch.bfloat16, "source", "size 4: .*--export-dtype float32"),
        (narrow(64, 173), 1, torch.float32, "source", "size 1: .*Choose another model"),
        (narrow(68, 96), 8, torch.bfloat16, "source", "width 68: .*--export-dtype float32"),
        (narrow(66, 96), 8, torch.float32, "source", "width 66: .*Choose another model"),
    ],
)
def test_a_size_that_the_export_refuses_comes_with_one_that_it_takes(
    config, size, stored, export_dtype, words
):
    found = inspection(config, stored=stored, export_dtype=export_dtype, expert_size=size)
    refusals = [warning for warning in found["warnings"] if warning.startswith("Export refuses")]
    assert len(refusals) == 1
    assert re.search(words, refusals[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inspect_warns_of_exactly_the_expert_sizes_that_convert_refuses(tiny_dense, dtype):
    dense = load_dense(str(tiny_dense("llama")), LoadConfig(device="cpu"))
    for size in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48):
        found = inspection(dense.config, stored=dtype, expert_size=size)
        warned = any("refuses expert size" in warning for warning in found["warnings"])
        split = Granularity(**found["granularity"])
        refused = FORMATS["glm4_moe"].refusal(dense, split, dtype) is not None
        assert warned == refused


def test_the_step_of_the_grouped_product_is_that_of_torch_and_of_the_exporter():
    ends = torch.tensor([2, 4], dtype=torch.int32)
    for dtype in (torch.float32, torch.bfloat16):
        step = GROUPED_MATMUL_BYTES // dtype.itemsize
        for width in (step, step // 2):
            x_TD, weights = torch.ones(4, width, dtype=dtype), torch.ones(2, width, width)
            product = partial(torch.nn.functional.grouped_mm, x_TD, weights.to(dtype), offs=ends)
            if width == step:
                assert bool((product() == width).all())
            else:
                with pytest.raises(RuntimeError):
                    product()


@pytest.mark.parametrize(
    ("stored", "export_dtype", "words"),
    [
        (torch.float16, "source", "float16.*bfloat16 .* or float32 .twice the size"),
        (torch.float64, "source", "stored as float64.*or float32"),
        (torch.float16, "bfloat16", None),
        (torch.float16, "float32", None),
        (torch.float32, "source", None),
    ],
)
def test_a_stored_dtype_that_the_export_refuses_is_named(stored, export_dtype, words):
    found = inspection(silent(), stored=stored, export_dtype=export_dtype, expert_size=64)
    assert len(found["warnings"]) == (0 if words is None else 1)
    if words is not None:
        assert re.search(words, found["warnings"][0])


LLAMA3 = {
    "rope_parameters": {
        **{"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0},
        **{"high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    }
}


@pytest.mark.parametrize("scaling", [{}, LLAMA3])
def test_inspect_warns_of_exactly_the_k_that_no_gguf_takes(scaling, tiny_dense):
    formats = pytest.importorskip("dotmoe.export.gguf_format").GGUF_FORMATS[:2]
    folder = tiny_dense("llama", num_hidden_layers=12, intermediate_size=160, **scaling)
    dense = load_dense(str(folder), LoadConfig(device="cpu"))
    refused = []
    for active in range(1, 41):
        found = inspection(dense.config, experts=40, active_experts=active)
        split = Granularity(**found["granularity"])
        reasons = [form.refusal(dense, split, torch.float32) for form in formats]
        refused.append(None not in reasons)
        assert any("llama.cpp runs at most" in said for said in found["warnings"]) is refused[-1]
    assert 0 < sum(refused) < 40
