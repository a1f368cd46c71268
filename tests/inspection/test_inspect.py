"""`dotmoe inspect`: exact counts, tables of 80 columns, JSON that adds up, and the stored dtype."""

import io
import json
import shutil
from dataclasses import replace

import pytest
import torch
from inspected_models import HERE, inspection, llama_3_8b, tiny
from rich.console import Console
from transformers import AutoConfig

from dotmoe.common.errors import UserError
from dotmoe.common.files import read_json
from dotmoe.common.tables import in_about, to_rich
from dotmoe.measure.inspection import chosen_in_time, stored_dtype
from dotmoe.measure.inspection.tables import tables_of
from dotmoe.method.config import RepairConfig
from dotmoe.run.config import recipe
from runs import TINY_FINETUNE, TinyRun, slow_but, with_an_outlier

EXACT = [
    "8,030,261,248",  # published
    "8,044,941,312",  # + 32 * 112 * 4,096 of routers
    "3,802,402,816",  # the paper's
    "3,817,082,880",
    "2,751,729,664",
    "2,393,116,672",  # all but 3 * 4,096 * 14,336 * 32 of the FFNs
    "1,342,443,520",
    "525,336,576",
]


def itemised(found):
    return [name for name in found if f"{name}_total" in found]


def shown(found):
    console = Console(file=io.StringIO(), width=80)
    console.print(*map(to_rich, tables_of(found)))
    return console.file.getvalue()


@pytest.mark.parametrize("options", [{}, {"steps": 0, "repair": True}, {"finetune_steps": 9}])
def test_tables_fit_eighty_columns_with_counts_split_sizes_and_every_machine(options):
    found = inspection(llama_3_8b(), **options)
    text = shown(found)
    for part in [
        *EXACT,
        "every layer 112 experts of 128 neurons",
        "28 run per token",
        "measured",
        "serving:",
    ]:
        assert part in text
    lines = text.splitlines()
    assert len(lines) <= 110
    assert max(map(len, lines)) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert text.count("warning") == 0
    assert "8 x H200" in text
    assert "dotmoe convert on this CPU" in text
    assert ("--repair-epochs 0" in text) == options.get("repair", False)
    for name in itemised(found):
        assert in_about(sum(found[name].values())) in text


def test_the_record_is_json_and_its_totals_are_sums():
    record = json.loads(json.dumps(inspection(llama_3_8b())))
    assert record["origin"] == "estimated"
    for name in itemised(record):
        assert record[f"{name}_total"] == sum(record[name].values()) > 0
    here, *gpus = (plan for plan in record["plans"] if plan["task"] == "align")
    assert (here["gpu"], here["origin"]) == ("this CPU", "measured")
    assert here["recommended"]["memory"]["dense weights"] == 4 * 8_030_261_248
    for plan in gpus:
        assert plan["origin"] == "quoted"
        for choice in plan["choices"]:
            assert choice["memory_total"] == sum(choice["memory"].values()) > 0
            assert choice["step_s"] == pytest.approx(sum(choice["parts"].values()))


def test_sequences_longer_than_the_context_are_costed_as_they_would_run():
    config = tiny(max_position_embeddings=512)
    short, long = (inspection(config, seq_len=n) for n in (512, 2_048))
    assert short == long


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
        index["metadata"] = {}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = AutoConfig.from_pretrained(folder)
    assert stored_dtype(config, folder) == getattr(torch, dtype)


def test_without_weights_the_config_says_the_dtype_and_damaged_ones_are_refused(tmp_path):
    for stated, found in (("float16", torch.float16), (None, torch.bfloat16)):
        config = tiny(dtype=stated)
        assert stored_dtype(config, tmp_path) == found
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(UserError, match=r"model.safetensors is no valid .*Get it again\.$"):
        stored_dtype(tiny(), tmp_path)


CHOICES = {
    "default": {},
    "shared-given": {"active": 0.25, "shared": 0.125},
    "cmoe": {"method": "cmoe"},
    "static": {"method": "static_pruning", "active": 0.25},
    "trained-router": {"method": "random_split", "router_steps": 2, "batch_size": 2},
    "small": {"recipe": "small", "steps": 2, "batch_size": 2},
    "granite": {"format": "granitemoe"},
    "in-a-day": {"time": "1d"},
}
STAGE_OF = {"tokenise": "data", "start from data": "calibrate", "alignment": "align"}
STAGE_OF |= {"dense layers": "dense_layers", "extraction": "extract", "evaluation": "evaluate"}


STATES = ("1_calibrate", "2_align")
QUICK = ("default",)


@pytest.mark.parametrize("name", slow_but(QUICK, CHOICES))
def test_the_plan_has_the_split_and_the_stages_of_the_conversion(
    name, tiny_dense, text_file, tmp_path, command
):
    layers = 12 if name in ("default", "granite") else 2
    model = tiny_dense("llama", num_hidden_layers=layers)
    if layers > 2:
        model = with_an_outlier(model, tmp_path)
    of_run = {"expert_size": 8, "seq_len": 32, "calibration_tokens": 64, "repair_tokens": 64}
    of_run |= {"eval_tokens": 64, "scale_tokens": 64, "verify_tokens": 32}
    of_run |= {"data": text_file, **CHOICES[name]}
    if name in ("in-a-day", "small"):  # which choose the repair, or make none
        del of_run["repair_tokens"]
    run = TinyRun("convert", model, tmp_path / "run", of_run)
    plans = [command("inspect", model, json=[], **of_run)]
    made = read_json(run.made().folder / "manifest.json")
    plans.append(command("inspect", json=[], config=run.folder / "config.json"))
    measured = run.results()["granularity"]
    if name == "default":  # nine of twelve experts, and four of these shared
        assert (measured["active_experts"] * 8, measured["shared_size"]) == (40, 32)
        experts = read_json(run.folder / "config.json")["experts"]
        assert (experts["active"], experts["shared"]) == (0.75, 4 / 12)
    for plan in (json.loads(each.out) for each in plans):
        found = plan["granularity"]
        if "dense_layers" in made["stages"]:
            assert measured["first_dense_layers"] == 1
            assert "leading layers" in plan["chosen"][-1]
            found["first_dense_layers"] = measured["first_dense_layers"]
        assert found == measured
        asked = read_json(run.folder / "0_data" / "data.json")["training"]["asked"]
        assert plan["run"]["text_tokens"] + of_run["eval_tokens"] == asked
        disk = {row["stage"]: row["disk"] for row in plan["conversions"][0]["stages"]}
        if name == "default":  # affinities and routers, which 2_align holds without steps, too
            states = [run.folder / stage / "state.safetensors" for stage in STATES]
            wanted = sum(file.stat().st_size for file in states)
            assert disk["start from data"] == pytest.approx(wanted, rel=0.1)
        stages = list(disk)
        splits = [s for s in stages if s.startswith("split by")]  # which extraction makes
        assert [STAGE_OF.get(s, s) for s in stages if s not in splits] == [
            stage
            for stage in made["stages"]
            if stage != "calibrate" or not splits
            if stage != "align" or made["config"]["align"]["steps"]
        ]


def test_a_named_gpu_is_planned_for_and_this_machine_is_not_even_measured(monkeypatch):
    monkeypatch.setattr("dotmoe.measure.inspection.estimates.measured_here", None)
    found = inspection(llama_3_8b(), gpu="h100", here=None, repair=True)
    one, eight = (each["stages"] for each in found["conversions"])
    shares = {
        a["stage"]: b["hours"] / a["hours"] for a, b in zip(one, eight, strict=True) if a != b
    }
    assert set(shares) == {"alignment", "repair"}, "the others are rank zero's alone"
    assert 1 / 8 < shares["repair"] < 0.5
    assert "on 1 x H100" in shown(found)
    assert "this CPU" not in shown(found)
    for how in ({"stored": torch.float32}, {"dtype": "float32"}):
        stages = inspection(llama_3_8b(), gpu="h100", here=None, **how)["conversions"][0]["stages"]
        assert stages[-2]["memory"]["dense weights"] == 4 * 8_030_261_248


@pytest.mark.parametrize(
    ("time", "options", "taken"),
    [
        ("96h", {}, RepairConfig()),
        ("60h", {}, RepairConfig(repair_epochs=0)),
        ("36h", {}, RepairConfig(repair_epochs=0, repair_tokens=16_384)),
        ("1s", {}, "no repair takes less here: the default repair about "),
        ("soon", {}, "time is 'soon', but it must be a duration"),
        ("1h", {"repairing": RepairConfig(repair_epochs=1)}, "Leave one of the two out"),
        ("1h", {"repair": False}, "Leave one of the two out"),
    ],
)
def test_the_best_repair_that_fits_into_a_time_is_taken(time, options, taken, tiny_dense):
    model = str(tiny_dense("llama", num_hidden_layers=2, intermediate_size=1_024))
    config = recipe(
        model=model, out="OUT", time=time, eval_tokens=64, data=("text.txt",), **options
    )
    machine = replace(HERE, flops_per_s=1e6, single_flops_per_s=1e6, double_flops_per_s=1e6)
    if isinstance(taken, str):
        with pytest.raises(UserError, match=taken):
            chosen_in_time(config, machine)
    else:
        chosen, why = chosen_in_time(config, machine)
        assert chosen == replace(config, repairing=taken)
        assert why.startswith(f"time {time}: takes ")


def test_a_run_records_the_repair_that_its_time_allowed_and_resumes_with_it(
    finished, tmp_path, command
):
    options = {name: value for name, value in finished.options.items() if name != "no_repair"}
    made = TinyRun("convert", finished.source, tmp_path, options | {"steps": 0, "time": "1d"})
    result = command(*made.command())
    assert (result.status, "time 1d: takes the default repair about" in result.err) == (0, True)
    record = read_json(made.folder / "config.json")
    assert (record["time"], record["repairing"]["repair_epochs"]) == ("1d", 2)
    assert command(*made.command()).status == 0
    line = command(*made.command(repair_epochs=5)).refusal()
    assert "options of a repair are given as well" in line, "as in a new folder"


def test_a_training_that_does_not_fit_says_what_it_changes(
    finished, tmp_path, command, monkeypatch
):
    monkeypatch.setattr("dotmoe.pipeline.device.memory_of", lambda device: 0)
    run, tuning = finished.at(tmp_path / "run"), TINY_FINETUNE | {"recipe": "small", "seq_len": 32}
    tuned = ["finetune", run.folder, tmp_path / "tuned"]
    for result in (command(*run.command()), command(*tuned, **tuning)):
        assert result.status == 0
        assert "by estimate: activation_checkpointing is on, micro_batch_size 1" in result.err
    monkeypatch.undo()
    stated = {"micro_batch_size": 1, "activation_checkpointing": []}
    finished.at(tmp_path / "stated", **stated).made()
    chosen, stated = (
        [json.loads(line)["loss"] for line in (tmp_path / name).read_text().splitlines()]
        for name in ("run/2_align/metrics.jsonl", "stated/2_align/metrics.jsonl")
    )
    assert chosen == stated
