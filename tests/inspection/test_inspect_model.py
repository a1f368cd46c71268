import json
import shutil

import pytest
import torch
from inspected_models import inspection, llama_3_8b, tiny
from transformers import (
    AutoConfig,
)

from dotmoe.errors import UserError
from dotmoe.inspection.costs import (
    PAPER_TOKENS,
    RunSize,
    total,
)
from dotmoe.inspection.device_time import measure_rates
from dotmoe.inspection.dtypes import bytes_held, stored_dtype
from dotmoe.models.family import family_of


def test_the_items_of_the_papers_run_are_three_forwards_of_all_products():
    found = inspection(llama_3_8b())
    assert found.run.tokens == PAPER_TOKENS == 458_752_000
    # Twice the parameters that multiply, to within attention scores and routers.
    simple = 3 * 2 * (8_030_261_248 - 128_256 * 4_096) * 458_752_000
    assert simple < total(found.flops) < 1.1 * simple


def test_hours_here_are_those_of_as_many_steps():
    found = inspection(llama_3_8b(), RunSize(device="cpu", steps=7))
    one = inspection(llama_3_8b(), RunSize(device="cpu", steps=1)).here
    assert found.here.origin == "measured"
    assert found.here.hours == pytest.approx(7 * one.hours)
    assert found.here.hours < found.here.hours_checkpointing < 1.5 * found.here.hours


def test_the_rate_of_this_machine_is_measured():
    rates = measure_rates(torch.device("cpu"), torch.float32, seconds=0.01)
    assert (rates.device, rates.dtype) == ("this CPU", "float32")
    assert 1e8 < rates.flops_per_s < 1e14
    assert 1e8 < rates.bytes_per_s < 1e13


@pytest.mark.parametrize("device", ["banana", "cuda:99"])
def test_a_device_that_is_not_there_is_refused_in_one_line(device):
    with pytest.raises(UserError, match=f"^device is '{device}', .*cpu.*cuda.*[.]$"):
        inspection(tiny(), RunSize(device=device))


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
    assert {plan["origin"] for plan in record["plans"]} == {"quoted"}
    for plan in record["plans"]:
        for choice in plan["choices"]:
            assert choice["memory_total"] == sum(item["amount"] for item in choice["memory"]) > 0
            assert choice["step_s"] == pytest.approx(sum(p["seconds"] for p in choice["parts"]))


def test_measuring_is_what_happens_when_no_rate_is_given():
    found = inspection(tiny(), RunSize(device="cpu"), rates=None, experts=16)
    assert (found.here.device, found.here.dtype) == ("this CPU", "float32")
    assert found.here.origin == "measured"


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
    assert on_cpu.plans == halved.plans
    assert total(on_cpu.memory) > total(halved.memory)


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
