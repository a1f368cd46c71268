"""Damage to a written export is found, and wrong ones are kept. Oracle: the masked model."""

import math
import shutil

import pytest
import torch

from dotmoe.common.errors import VerificationError
from dotmoe.export import routers
from dotmoe.export.architectures import FORMATS
from dotmoe.export.config import ExportConfig, GgufConfig
from dotmoe.export.format import ConvertedModel
from dotmoe.export.verify import problems, sample_tokens
from dotmoe.export.write import ExportRecord, export
from dotmoe.models.checkpoint import Tensors
from dotmoe.models.load import describe_dense
from runs import put_into, rewritten


@pytest.fixture(scope="module")
def sound(dense_of, layout_of, tokens_BT, tmp_path_factory):
    """A verified export."""
    dense, folder = dense_of("llama"), tmp_path_factory.mktemp("sound") / "out"
    layout = layout_of(dense)
    return dense, layout, folder, export(dense, (layout,), folder, ExportConfig(), tokens_BT)


@pytest.fixture
def verified(sound, tokens_BT, tmp_path):
    """Gives a copy of the same, to be damaged, and what finds out what verification says of it."""
    dense, layout, folder, record = sound
    converted = ConvertedModel(
        dense=dense,
        tensors=Tensors.of(dense),
        layouts=(layout,),
        exponents={scale["layer"]: scale["exponent"] for scale in record.routers},
        dtype=torch.float32,
        config=GgufConfig(),
        origin=dense,
    )
    copy = shutil.copytree(folder, tmp_path / "copy")
    return copy, lambda: " ".join(FORMATS["glm4_moe"].check(converted, copy, tokens_BT)[1])


def down(number):
    return f"model.layers.1.mlp.experts.{number}.down_proj.weight"


def swap(tensors):
    tensors[down(0)], tensors[down(5)] = tensors[down(5)], tensors[down(0)]


def rotate(tensors):
    turned = [tensors[down((number + 1) % 12)] for number in range(12)]
    tensors |= {down(number): tensor for number, tensor in enumerate(turned)}


def times(name, factor):
    return lambda tensors: tensors[name].mul_(factor)


def wake(tensors):
    for name in ("gate", "up", "down"):
        tensors[f"model.layers.0.mlp.shared_experts.{name}_proj.weight"] += 0.05


ROUTER = "model.layers.0.mlp.gate.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (swap, r"layer 1: .* block error is"),
        (rotate, r"layer 1: median relative block error is \d.*, limit 0.004"),
        (times(down(4), 1.5), r"layer 1: 95th percentile of the block error is \S+, limit"),
        (wake, r"layer 0: median relative block error"),
        (times(ROUTER, 2.0**-11), "layer 0: share of misrouted"),  # scores collapse into ties
        (times(ROUTER, 2.0**4), "layer 0: median relative block error"),  # gates leave 1
        (times(ROUTER, -1.0), "layer 0: share of misrouted"),
        (times("model.layers.1.self_attn.o_proj.weight", 1.05), "(top-1 disag|median logit err)"),
        (times("model.norm.weight", math.nan), r"model.norm.weight .* contains NaN"),
        (lambda tensors: tensors.pop(ROUTER), "missing_keys"),
    ],
)
def test_a_damaged_weight_fails_with_place_figure_and_limit(change, words, verified):
    folder, problems_found = verified
    with rewritten(folder) as tensors:
        change(tensors)
    with pytest.raises(VerificationError, match=words):
        raise VerificationError(problems_found())


def test_a_config_that_is_not_what_was_written_is_found(verified):
    folder, problems_found = verified
    put_into(folder / "config.json", rope_theta=None)
    with pytest.raises(VerificationError, match=r"config.json in .* is not what was written"):
        problems_found()


def test_export_leaves_the_dense_model_as_it_was(dense_of, exported):
    dense = dense_of("qwen2", dtype="bfloat16", load_dtype="bfloat16")
    before = {name: tensor.clone() for name, tensor in dense.model.state_dict().items()}
    exported(dense)
    after = dense.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in dense.model.modules())


def test_a_nan_is_beyond_every_limit_and_those_of_logits_grow_with_the_depth(sound):
    found = sound[3].verification
    assert "median logit error is nan" in problems(found | {"logits_error": math.nan}, 1, 0)[0]
    found = found | {"logits_error": 0.009, "dense_error": 0.004}
    assert len(problems(found, 2e-3, 0.0)) == 2
    assert problems(found | {"layers": found["layers"] * 8}, 2e-3, 0.0) == []


@pytest.mark.parametrize(
    ("metric", "limit", "words"),
    [  # of 512 tokens: a share and four standard errors of a Poisson count
        ("misrouted", 0.05 + 4 * (0.05 / 512) ** 0.5, "layer 0: share of misrouted tokens"),
        ("block_error", 4e-3, "layer 0: median relative block error"),
        ("block_error_tail", 2e-2, "layer 0: 95th percentile of the block error"),
        ("top1_agreement", 0.01 + 4 * (0.01 / 512) ** 0.5, "top-1 disagreement"),
        ("logits_error", 5e-3, "median logit error"),
        ("logits_error_tail", 2.5e-2, "95th percentile of the logit error"),
        ("dense_error", 2e-3, "median logit error at k = E"),
    ],
)
def test_each_metric_alone_is_a_problem_beyond_its_limit(metric, limit, words):
    layer = {"layer": 0} | dict.fromkeys(("misrouted", "block_error", "block_error_tail"), 0.0)
    for factor, is_wrong in ((0.99, False), (1.01, True)):
        value = factor * limit
        found = {"tokens": 512, "layers": [layer], "top1_agreement": 1.0} | dict.fromkeys(
            ("logits_error", "logits_error_tail", "dense_error"), 0.0
        )
        if metric in layer:
            found["layers"] = [layer | {metric: value}]
        else:
            found[metric] = 1 - value if metric == "top1_agreement" else value
        said = problems(found, 4e-3, 0.0)
        assert [f": {words} is" in each for each in said] == [True] * is_wrong


def test_a_tail_lies_above_the_median(sound):
    found = sound[3].verification
    for each, name in [(found, "logits_error"), *((e, "block_error") for e in found["layers"])]:
        assert each[f"{name}_tail"] > each[name] > 0


@pytest.mark.parametrize(
    ("limit", "context", "expected"),
    [(512, 256, (4, 96)), (200, 256, (2, 96)), (50, 256, (1, 50)), (160, 40, (4, 40))],
)
def test_samples_keep_to_the_limit_and_the_context(limit, context, expected):
    tokens = torch.zeros(4, 96, dtype=torch.long)
    assert tuple(sample_tokens(tokens, limit, context).shape) == expected


@pytest.mark.parametrize("target", ["glm4_moe", "mixtral"])
def test_an_outlier_token_does_not_refuse_a_right_export(target, copied, layout_of, exported):
    """Token 0 has a massive activation, which the router amplifies."""
    with rewritten(copied) as tensors:
        embedding = tensors["model.embed_tokens.weight"]
        embedding[:, 0] = embedding[0] = 0
        embedding[0, 0] = 400
        for layer in range(2):
            for name in ("self_attn.o_proj", "mlp.down_proj"):
                tensors[f"model.layers.{layer}.{name}.weight"][0] = 0
    dense = describe_dense(str(copied))
    layout = layout_of(dense)
    layout.router_LED[:, :, 0] = 0
    layout.router_LED[:, 7, 0] = 14
    tokens_BT = torch.randint(2, 258, (8, 256))
    tokens_BT[0, 0] = 0
    record = exported(dense, layout, text_BT=tokens_BT, format=target).record
    rows = [row for scale in record.routers for row in scale["runtimes"]]
    assert max(row["gate_deviation"] for row in rows) < 2**-6
    assert record.verification["layers"][0]["outliers"] == 1 / 512
    assert record.problems == []


def test_an_export_beyond_a_limit_is_kept_and_called_unverified_with_exit_code_3(
    tiny_dense, text_file, tmp_path, monkeypatch, command
):
    monkeypatch.setattr(routers, "LOG2_SCALED_STD", -24.0)
    options = {"data": text_file, "steps": 0, "seq_len": 64, "eval_tokens": 256}
    for _ in range(2):  # a second try replaces what the first left
        ended = command("convert", tiny_dense("llama"), tmp_path / "run", **options)
        assert (ended.status, "5_export_unverified" in ended.err) == (3, True)
        assert not list((tmp_path / "run/5_export").iterdir())
    out = tmp_path / "run/5_export_unverified"
    record = ExportRecord.load(out)
    assert "misrouted" in record.problems[0]
    assert (record.name, record.verification is None) == (out.name, False)
    assert (out / "model.safetensors").is_file()
    assert "**Unverified.** " in (out / "README.md").read_text()
