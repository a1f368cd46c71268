"""The whole benchmark on a tiny pair: what it tells, and what it refuses. No speed is judged."""

import io
import json
import os
import signal
import sys
import time
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, DynamicCache

from dotmoe.bench import BenchConfig, bench, render
from dotmoe.bench.points import Point, WorkerSetup, random_tokens
from dotmoe.bench.random_pair import random_layout, write_random_dense
from dotmoe.bench.sources import sources
from dotmoe.bench.transformers_runner import TransformersRunner
from dotmoe.bench.worker_process import WorkerProcess
from dotmoe.errors import UserError

SMALL = {
    "batch_sizes": (1, 3),
    "prompt_tokens": 9,
    "context_tokens": 5,
    "decode_steps": 2,
    "rounds": 2,
    "threads": 1,
}


def measured(dense, moe):
    told = []
    config = BenchConfig(dense=str(dense), moe=str(moe), **SMALL)
    result = bench(config, lambda done, total, note: told.append((done, total)))
    assert told[0] == (0, 6)
    assert told[-1] == (6, 6)
    return result


@pytest.fixture(scope="module")
def checkpoints(pair):
    return measured(pair / "dense", pair / "glm4_moe")


def require_sound(result):
    record = json.loads(json.dumps(result.as_dict()))
    assert record["origin"] == "measured"
    assert {"commit", "versions", "hardware", "threads", "seed"} <= record["provenance"].keys()
    assert [(p["point"]["name"], p["point"]["batch"]) for p in record["points"]] == [
        ("prefill", 1),
        ("decode", 1),
        ("decode", 3),
    ]
    for point in record["points"]:
        dense, moe = point["dense"], point["moe"]
        steps = 1 if point["point"]["name"] == "prefill" else 2
        for side in (dense, moe):
            assert side["timing"]["samples"] == 2 * steps
            assert side["tokens_per_s"] > 0
            assert side["peak_bytes"] > 0
        assert point["speed_ratio"] == pytest.approx(moe["tokens_per_s"] / dense["tokens_per_s"])
        is_decode = point["point"]["name"] == "decode"
        figure = "weight_bytes" if is_decode else "flops_per_token"
        assert point["ideal_ratio"] == pytest.approx(dense[figure] / moe[figure])
        assert point["share_of_ideal"] * point["ideal_ratio"] == pytest.approx(point["speed_ratio"])
        assert dense["experts_touched"] == 0
        assert 3 <= moe["experts_touched"] <= 12
    assert record["points"][1]["moe"]["experts_touched"] == 3
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render(result))
    assert "decode x 3" in console.export_text()


def test_checkpoints_are_measured_in_transformers(checkpoints):
    require_sound(checkpoints)
    assert checkpoints.runtime == "transformers"
    assert {point.moe.experts_touched_by for point in checkpoints.points} == {"measured"}
    # An FFN of 96 neurons with 24 of them active, and a shared expert of zeros of 8.
    ffn, rest = 3 * 32 * 96, 2 * 32 * 32 + 2 * 32 * 16
    fixed = 2 * rest + 32 * 320
    dense, moe = fixed + 2 * ffn, fixed + 2 * (ffn * 32 // 96 + 12 * 32)
    decode = checkpoints.points[1]
    keys = 2 * 4 * 32 * (6 + 7) / 2
    assert decode.dense.flops_per_token == 2 * dense + keys
    assert decode.moe.flops_per_token == 2 * moe + keys


def test_gguf_files_are_measured_in_llama_cpp(gguf_pair):
    result = measured(*gguf_pair)
    require_sound(result)
    assert result.runtime == "llama.cpp"
    assert {p.moe.experts_touched_by for p in result.points} == {"independent routing"}
    assert result.provenance["versions"]["llama_cpp_python"] != "not installed as a package"


def test_gguf_files_and_checkpoints_of_one_model_count_the_same_products(gguf_pair, checkpoints):
    _, *found = sources(*map(str, gguf_pair))
    from dotmoe.bench.gguf_weights import gguf_header

    dense = gguf_header(found[0].path).weights
    assert dense.fixed.products == checkpoints.dense.loaded.weights.fixed.products
    assert dense.head.products == checkpoints.dense.loaded.weights.head.products
    moe = gguf_header(found[1].path).weights
    assert moe.expert.products == checkpoints.moe.loaded.weights.expert.products


def setup_for(folder, **changes):
    setup = WorkerSetup(
        runtime="transformers",
        path=str(folder),
        device="cpu",
        dtype="float32",
        threads=1,
        experts_implementation="grouped_mm",
        repack=False,
        clock="wall",
        seed=3,
    )
    return replace(setup, **changes)


def test_every_round_of_decode_starts_from_the_same_cache(pair):
    runner = TransformersRunner(setup_for(pair / "glm4_moe"))
    runner.load()
    point = Point(name="decode", batch=2, tokens=6, steps=3)
    runner.prepare(point)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in runner._cache.layers]
    runner.run()
    assert runner._cache.get_seq_length() == 6
    for layer, (keys, values) in zip(runner._cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)


def test_decode_computes_what_a_forward_over_all_tokens_does(pair):
    seen = []
    runner = TransformersRunner(setup_for(pair / "dense"))
    runner.load()
    runner.prepare(Point(name="decode", batch=2, tokens=6, steps=3))
    runner._model.register_forward_hook(lambda module, args, output: seen.append(output.logits))
    runner.run()
    ids_BT = torch.tensor(random_tokens(320, 18, seed=3)).view(2, 9)
    model = AutoModelForCausalLM.from_pretrained(pair / "dense", dtype=torch.float32)
    with torch.no_grad():
        whole_BTV = model(ids_BT, past_key_values=DynamicCache()).logits
    assert torch.allclose(torch.cat(seen, dim=1), whole_BTV[:, 6:], atol=1e-5)


def test_a_run_folder_means_its_export(pair, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "5_export").symlink_to(pair / "mixtral")
    _, _, moe = sources(str(pair / "dense"), str(run))
    assert moe.path == run / "5_export"
    assert moe.num_experts == 12


def test_models_that_cannot_be_compared_are_refused(pair, shape, tmp_path):
    dense, moe = str(pair / "dense"), str(pair / "glm4_moe")
    for arguments, words in (
        ((dense, "moe.gguf"), r"moe.gguf is a GGUF file and .* is not"),
        ((moe, dense), r"has 12 experts a layer. Give the dense model first"),
        ((dense, dense), r"has no experts"),
        ((dense, str(tmp_path / "nowhere")), r"nowhere does not exist"),
    ):
        with pytest.raises(UserError, match=words):
            sources(*arguments)
    for name, change, words in (
        ("vocabulary", {"vocabulary": 300}, r"vocabulary of .* is 300 and of .* 320"),
        ("layers", {"layers": 3}, r"number of layers of .* is 3 and of .* 2"),
        ("width", {"width": 64}, r"model width of .* is 64 and of .* 32"),
    ):
        folder = tmp_path / name
        write_random_dense(replace(shape, **change), folder, torch.float32, seed=0)
        with pytest.raises(UserError, match=words):
            sources(str(folder), moe)


def test_gguf_files_without_llama_cpp_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(UserError, match=r"pip install 'dotmoe\[llama-cpp\]'"):
        sources("dense.gguf", "moe.gguf")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_sizes": (0,)}, "each must be at least 1"),
        ({"rounds": 0}, "rounds is 0, but it must be at least 1"),
        ({"batch_sizes": (), "prompt_tokens": 0}, "nothing to measure"),
    ],
)
def test_counts_that_cannot_be_run_are_refused(changes, words):
    with pytest.raises(UserError, match=words):
        BenchConfig(dense="a", moe="b", **{**SMALL, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt_tokens": 257}, "prompt_tokens is 257, but .* has a context of 256"),
        ({"context_tokens": 255}, r"context_tokens \+ decode_steps is 257"),
    ],
)
def test_more_tokens_than_the_context_are_refused(pair, changes, words):
    models = {"dense": str(pair / "dense"), "moe": str(pair / "glm4_moe")}
    with pytest.raises(UserError, match=words):
        bench(BenchConfig(**models, **{**SMALL, **changes}), lambda *told: None)


def test_time_of_the_processor_is_refused_for_several_threads(pair):
    models = {"dense": str(pair / "dense"), "moe": str(pair / "glm4_moe")}
    config = BenchConfig(**models, **{**SMALL, "threads": 2, "clock": "cpu"})
    with pytest.raises(UserError, match="clock is cpu with 2 threads"):
        bench(config, lambda *told: None)


def test_time_of_the_processor_stands_still_while_a_process_sleeps(pair):
    setup = setup_for(pair, clock="cpu")
    start, wall = setup.now(), setup_for(pair).now()
    time.sleep(0.2)
    assert setup.now() - start < 0.1
    assert setup_for(pair).now() - wall >= 0.2


def test_what_happens_to_a_worker_is_told(pair, tmp_path):
    with WorkerProcess(setup_for(tmp_path)) as worker, pytest.raises(RuntimeError, match="Unrecog"):
        worker.load()
    with WorkerProcess(setup_for(pair / "dense")) as worker:
        os.kill(worker._process.pid, signal.SIGKILL)
        with pytest.raises(UserError, match="memory runs out"):
            worker.load()


def test_a_random_layout_is_balanced_and_reproducible(shape):
    one, again, other = (random_layout(shape, 12, 3, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.expert_of_neuron_LN, again.expert_of_neuron_LN)
    assert not torch.equal(one.expert_of_neuron_LN, other.expert_of_neuron_LN)
    assert (one.expert_of_neuron_LN[0].bincount() == 8).all()
    assert torch.equal(one.router_LED, one.router_LED.bfloat16().float())
