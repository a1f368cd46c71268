import json
import re
import shutil
from functools import partial

import pytest
import torch
from transformers import (
    AutoConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
)

from dotmoe.errors import UserError
from dotmoe.export.glm4_moe import Glm4Moe
from dotmoe.granularity import GROUPED_MATMUL_BYTES, ExpertsConfig
from dotmoe.inspection.costs import (
    PAPER_TOKENS,
    RunSize,
    total,
)
from dotmoe.inspection.device_time import UTILISATION, MatmulRate, measure_matmul_rate
from dotmoe.inspection.dtypes import bytes_held, stored_dtype
from dotmoe.inspection.inspect_model import inspect_model
from dotmoe.load import LoadConfig, load_dense
from dotmoe.models.family import family_of

RATE = MatmulRate(device="a test", dtype="bfloat16", flops_per_s=1e12)


TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2_048,
}


def tiny(kind=LlamaConfig, **changes):
    return kind(**{**TINY, "tie_word_embeddings": False, "sliding_window": None, **changes})


def llama_3_8b():
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=4_096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8_192,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


def inspection(
    config, run=None, *, stored=torch.bfloat16, export_dtype="source", rate=RATE, **experts
):
    return inspect_model(
        config,
        family_of(config),
        ExpertsConfig(**experts),
        run or RunSize(bytes_per_weight=2),
        stored=stored,
        export_dtype=export_dtype,
        rate=rate,
    )


def test_the_papers_run_takes_less_than_the_papers_three_hours_on_eight_h100():
    found = inspection(llama_3_8b())
    h100 = next(row for row in found.times if row.device.startswith("H100"))
    assert found.run.tokens == PAPER_TOKENS == 458_752_000
    assert 8 < h100.hours < h100.hours_checkpointing < 24
    # 3 forwards of twice the parameters that multiply, to within attention scores and routers.
    simple = 3 * 2 * (8_030_261_248 - 128_256 * 4_096) * 458_752_000
    assert simple < total(found.flops) < 1.1 * simple


def test_planned_hours_are_work_over_rate_and_say_where_the_rate_is_from():
    found = inspection(llama_3_8b())
    assert [row.origin for row in found.times] == ["measured", "quoted", "quoted", "quoted"]
    assert [row.flops_per_s / 1e12 for row in found.times] == [1, 312, 989, 989]
    for row in found.times:
        work = row.hours * 3_600 * row.flops_per_s * UTILISATION
        assert work == pytest.approx(total(found.flops))


@pytest.mark.parametrize(
    ("micro_batch_size", "fits"),
    [
        # About 12 GiB a sequence of 2,048 tokens without checkpointing, 1.2 GiB with it.
        (1, ["yes", "yes", "yes"]),
        (8, ["with checkpointing", "with checkpointing", "yes"]),
        (64, ["no", "no", "with checkpointing"]),
    ],
)
def test_fits_names_the_gpus_whose_memory_is_enough(micro_batch_size, fits):
    found = inspection(llama_3_8b(), RunSize(micro_batch_size=micro_batch_size))
    assert [row.fits for row in found.times[1:]] == fits
    assert found.times[0].fits is None


def test_the_rate_of_this_machine_is_measured():
    rate = measure_matmul_rate(torch.device("cpu"), torch.float32, seconds=0.01)
    assert (rate.device, rate.dtype) == ("this CPU", "float32")
    assert 1e8 < rate.flops_per_s < 1e14


@pytest.mark.parametrize("device", ["banana", "cuda:99"])
def test_a_device_that_is_not_there_is_refused_in_one_line(device):
    with pytest.raises(UserError, match=f"^device is '{device}', .*cpu.*cuda.*[.]$"):
        inspection(tiny(), RunSize(device=device))


SILENT = {"num_hidden_layers": 1, "intermediate_size": 1_024}
"""A model that nothing is to be said about, with experts of 64 neurons."""


@pytest.mark.parametrize(
    ("config", "experts", "run", "words"),
    [
        (tiny(**SILENT), {"expert_size": 64}, {}, []),
        (tiny(**SILENT), {"expert_size": 32}, {}, ["not a multiple of 64"]),
        (tiny(**SILENT), {"expert_size": 16}, {}, ["not a multiple of 32: llama.cpp"]),
        (
            tiny(num_hidden_layers=1, intermediate_size=64 * 128),
            {"expert_size": 64, "active_experts": 32},
            {},
            [],
        ),
        (
            tiny(num_hidden_layers=1, intermediate_size=64 * 128),
            {"expert_size": 64, "active_experts": 33},
            {},
            ["33 experts run per token"],
        ),
        (
            tiny(num_hidden_layers=1, intermediate_size=64 * 512),
            {"expert_size": 64, "active_experts": 8},
            {},
            [],
        ),
        (
            tiny(num_hidden_layers=1, intermediate_size=64 * 513),
            {"expert_size": 64, "active_experts": 8},
            {},
            ["513 experts"],
        ),
        (
            tiny(**SILENT, tie_word_embeddings=True, dtype="bfloat16"),
            {"expert_size": 64},
            {},
            ["written out: 64.00 KiB more"],
        ),
        (
            tiny(MistralConfig, **SILENT, sliding_window=128),
            {"expert_size": 64},
            {},
            ["context is lowered from 2,048 to 128"],
        ),
        (tiny(MistralConfig, **SILENT, sliding_window=2_048), {"expert_size": 64}, {}, []),
        (
            tiny(Qwen2Config, **SILENT, use_sliding_window=False),
            {"expert_size": 64},
            {},
            [],
        ),
        (
            tiny(**SILENT),
            {"expert_size": 64},
            {"steps": 3_499},
            ["sees 458,620,928 tokens; the pa"],
        ),
        (
            tiny(**SILENT, max_position_embeddings=512),
            {"expert_size": 64},
            {},
            ["shortened from 2,048 to 512 tokens"],
        ),
    ],
)
def test_warnings_appear_exactly_when_they_should(config, experts, run, words):
    warnings = inspection(config, RunSize(**run), **experts).warnings
    assert len(warnings) == len(words)
    for warning, part in zip(warnings, words, strict=True):
        assert part in warning


def test_warnings_add_up():
    config = tiny(tie_word_embeddings=True, intermediate_size=1_200)
    found = inspection(config, RunSize(steps=10), experts=600, active_experts=150)
    assert len(found.warnings) == 6


def test_a_width_that_does_not_split_proposes_the_nearest():
    with pytest.raises(UserError, match="Choose 64 or 128"):
        inspection(tiny(), expert_size=100)


def test_the_record_is_json_and_its_totals_are_sums():
    record = json.loads(json.dumps(inspection(llama_3_8b()).as_dict()))
    assert record["origin"] == "estimated"
    assert record["granularity"] == {
        "num_experts": 112,
        "expert_size": 128,
        "active_experts": 28,
        "shared_size": 0,
        "first_dense_layers": 0,
    }
    assert record["counts"]["active"] == 3_802_402_816
    for name in ("memory", "memory_checkpointing", "calibration_memory", "export_memory", "disk"):
        assert record[f"{name}_total"] == sum(item["amount"] for item in record[name]) > 0
    assert record["times"][2]["origin"] == "quoted"


def test_measuring_is_what_happens_when_no_rate_is_given():
    found = inspection(tiny(), RunSize(device="cpu"), rate=None, experts=16)
    assert (found.times[0].device, found.times[0].dtype) == ("this CPU", "float32")
    assert found.times[0].origin == "measured"


def test_sequences_longer_than_the_context_are_costed_as_they_would_run():
    short, long = (
        inspection(tiny(max_position_embeddings=512), RunSize(seq_len=n)) for n in (512, 2_048)
    )
    assert long.run == short.run
    assert (long.memory, long.flops) == (short.memory, short.flops)


@pytest.mark.parametrize(
    ("asked", "stored", "held"),
    [
        (None, torch.bfloat16, 4),
        (None, torch.float16, 4),
        (None, torch.float32, 4),
        (2, torch.float32, 2),
    ],
)
def test_a_cpu_holds_float32_weights_unless_asked_otherwise(asked, stored, held):
    found = inspection(llama_3_8b(), RunSize(device="cpu", bytes_per_weight=asked), stored=stored)
    assert found.run.bytes_per_weight == held
    assert found.memory[0].amount == held * 8_030_261_248


@pytest.mark.parametrize(
    ("stored", "held"), [(torch.bfloat16, 2), (torch.float16, 2), (torch.float32, 4)]
)
def test_a_gpu_holds_weights_as_they_are_stored(stored, held):
    assert bytes_held(None, "cuda", stored) == held


def test_what_fits_a_quoted_gpu_does_not_depend_on_what_this_cpu_holds():
    on_cpu, halved = (inspection(llama_3_8b(), RunSize(bytes_per_weight=n)) for n in (4, 2))
    assert [row.fits for row in on_cpu.times] == [row.fits for row in halved.times]
    assert total(on_cpu.memory) > total(halved.memory)


def narrow(width, ffn):
    """A model of one layer whose other warnings are few."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return tiny(num_hidden_layers=1, hidden_size=width, intermediate_size=ffn, **heads)


@pytest.mark.parametrize(
    ("config", "size", "stored", "export_dtype", "words"),
    [
        (narrow(64, 96), 6, torch.float32, "source", "size 6: .*of 4 only. Give .*-size 4 or 8."),
        (narrow(64, 96), 4, torch.float32, "source", None),
        (narrow(64, 96), 4, torch.bfloat16, "source", "size 4: .*of 8 only. Give .*-size 8."),
        (narrow(64, 96), 12, torch.bfloat16, "source", "Give --expert-size 8 or 16."),
        (narrow(64, 96), 12, torch.bfloat16, "float32", None),
        (narrow(64, 96), 12, torch.float32, "bfloat16", "size 12: in bfloat16"),
        (narrow(64, 172), 4, torch.bfloat16, "source", "--export-dtype float32, which takes mul"),
        (narrow(64, 172), 2, torch.bfloat16, "source", "dtype float32 with --expert-size 4."),
        (narrow(64, 173), 1, torch.float32, "source", "No split of this model can be exported"),
        (narrow(68, 96), 8, torch.bfloat16, "source", "width 68: .*Give --export-dtype float32,"),
        (narrow(68, 96), 8, torch.float32, "source", None),
        (narrow(66, 96), 8, torch.float32, "source", "width 66: .*No split of this model"),
    ],
)
def test_a_size_that_the_export_refuses_comes_with_one_that_it_takes(
    config, size, stored, export_dtype, words
):
    found = inspection(config, stored=stored, export_dtype=export_dtype, expert_size=size)
    refusals = [warning for warning in found.warnings if warning.startswith("Export refuses")]
    assert len(refusals) == (0 if words is None else 1)
    if words is not None:
        assert re.search(words, refusals[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inspect_warns_of_exactly_the_expert_sizes_that_convert_refuses(tiny_dense, dtype):
    dense = load_dense(str(tiny_dense("llama")), LoadConfig(device="cpu"))
    for size in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48):
        found = inspection(dense.config, stored=dtype, expert_size=size)
        warned = any("refuses expert size" in warning for warning in found.warnings)
        refused = Glm4Moe().refusal(dense, found.granularity, dtype) is not None
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
        (torch.float16, "source", "float16.*bfloat16 .* or float32 .exact, twice the size"),
        (torch.float64, "source", "float64.*or float32 .rounds the weights"),
        (torch.float16, "bfloat16", None),
        (torch.float16, "float32", None),
        (torch.float32, "source", None),
    ],
)
def test_a_stored_dtype_that_the_export_refuses_is_named(stored, export_dtype, words):
    found = inspection(tiny(**SILENT), stored=stored, export_dtype=export_dtype, expert_size=64)
    assert len(found.warnings) == (0 if words is None else 1)
    if words is not None:
        assert re.search(words, found.warnings[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("sharded", [False, True])
def test_the_stored_dtype_is_read_from_the_weights_not_from_the_config(
    tiny_dense, tmp_path, dtype, sharded
):
    folder = shutil.copytree(tiny_dense("llama", dtype=dtype), tmp_path / "model")
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**stated, "dtype": "float64"}))
    if sharded:
        (folder / "model.safetensors").rename(folder / "part.safetensors")
        index = {"weight_map": {"model.layers.0.mlp.gate_proj.weight": "part.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = AutoConfig.from_pretrained(folder)
    assert stored_dtype(config, family_of(config), folder) == getattr(torch, dtype)


@pytest.mark.parametrize(("stated", "found"), [("float16", torch.float16), (None, torch.bfloat16)])
def test_without_weights_the_config_says_the_dtype(tmp_path, stated, found):
    config = tiny(dtype=stated)
    assert stored_dtype(config, family_of(config), tmp_path) == found


def test_damaged_weights_are_refused_in_one_line(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(UserError, match=r"model.safetensors cannot be read .*Get it again\.$"):
        stored_dtype(tiny(), family_of(tiny()), tmp_path)
