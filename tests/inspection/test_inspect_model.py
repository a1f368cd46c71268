import io
import json

import pytest
from rich.console import Console
from transformers import (
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
)

from dotmoe.errors import UserError
from dotmoe.granularity import ExpertsConfig
from dotmoe.inspection.costs import (
    PAPER_TOKENS,
    RunSize,
    total,
)
from dotmoe.inspection.device_time import UTILISATION, MatmulRate, measure_matmul_rate
from dotmoe.inspection.inspect_model import in_bytes, inspect_model, render
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
    "max_position_embeddings": 512,
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


def inspection(config, run=None, **experts):
    family = family_of(config)
    return inspect_model(config, family, ExpertsConfig(**experts), run or RunSize(), RATE)


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


def test_the_rate_of_this_machine_is_measured_in_the_dtype_of_the_run():
    run = RunSize(bytes_per_weight=4, device="cpu")
    rate = measure_matmul_rate(run, seconds=0.01)
    assert (rate.device, rate.dtype) == ("cpu", "float32")
    assert 1e8 < rate.flops_per_s < 1e14


@pytest.mark.parametrize("device", ["banana", "cuda:99"])
def test_a_device_that_is_not_there_is_refused_in_one_line(device):
    with pytest.raises(UserError, match=f"^device '{device}' cannot be used.*Choose cpu.$"):
        measure_matmul_rate(RunSize(device=device))


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
            ["context is lowered from 512 to 128"],
        ),
        (tiny(MistralConfig, **SILENT, sliding_window=512), {"expert_size": 64}, {}, []),
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
    assert len(found.warnings) == 5


def test_a_width_that_does_not_split_proposes_the_nearest():
    with pytest.raises(UserError, match="Choose 64 or 128"):
        inspection(tiny(), expert_size=100)


def test_the_record_is_json_and_its_totals_are_sums():
    record = json.loads(json.dumps(inspection(llama_3_8b()).as_dict()))
    assert record["origin"] == "estimated"
    assert record["granularity"] == {"num_experts": 112, "expert_size": 128, "active_experts": 28}
    assert record["counts"]["active"] == 3_802_402_816
    for name in ("memory", "memory_checkpointing", "calibration_memory", "export_memory", "disk"):
        assert record[f"{name}_total"] == sum(item["amount"] for item in record[name]) > 0
    assert record["times"][2]["origin"] == "quoted"


def test_the_tables_show_the_figures():
    config = llama_3_8b()
    found = inspection(config, RunSize(steps=10))
    console = Console(file=io.StringIO(), width=120)
    console.print(render(found))
    text = console.file.getvalue()
    for part in ("3,802,402,816", "112", "28", "2,393,116,672", "quoted", "measured", "40%"):
        assert part in text
    assert in_bytes(total(found.memory)) in text
    assert "warning: The run sees 1,310,720 tokens" in text


def test_measuring_is_what_happens_when_no_rate_is_given():
    config = tiny()
    run = RunSize(device="cpu", bytes_per_weight=4)
    found = inspect_model(config, family_of(config), ExpertsConfig(experts=16), run)
    assert found.times[0].device == "cpu, float32"
    assert found.times[0].origin == "measured"


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0, "0 B"), (1_023, "1023 B"), (1_536, "1.50 KiB"), (5 * 2**40, "5.00 TiB")],
)
def test_sizes_are_told_in_binary_units(amount, text):
    assert in_bytes(amount) == text
