"""Every family in every format that holds it. Oracles: the masked model, and stock Transformers."""

import json
import shutil
import sys
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from dotmoe.common.errors import UserError
from dotmoe.export.architectures import FORMATS
from dotmoe.export.config import ExportConfig
from dotmoe.export.write import require_exportable
from dotmoe.method.granularity import Granularity
from dotmoe.method.layout import DROPPED
from dotmoe.models.family import FAMILIES
from dotmoe.models.load import describe_dense
from export.comparison import (
    logits_of,
    masked_logits,
    relative_error,
    step_by_step,
    stock_logits,
    without_last,
)
from runs import (
    FORMATS_OF,
    FORMATS_OF_KIN,
    GRANITE_FACTORS,
    loaded,
    on_ranks,
    rewritten,
    rope,
    weights_of,
)

STOCK = [name for name, form in FORMATS.items() if form.gating.score != "none"]
FORMATS_OF = FORMATS_OF | FORMATS_OF_KIN
PAIRS = [(family, target) for family, targets in FORMATS_OF.items() for target in targets]
SPLIT = Granularity(num_experts=12, expert_size=8, active_experts=3)
SETTINGS = {family: GRANITE_FACTORS if family == "granite" else {} for family in FORMATS_OF}
SHARED = ("bfloat16", {"intermediate_size": 120}, {"shared_size": 24})
LEADING = ("float32", {"num_hidden_layers": 3}, {"dense_layers": 1})
HOLD_SHARED = (("llama", "glm4_moe"), ("granite", "granitemoe"))
HOLD_DENSE = (("llama", "glm4_moe"), ("qwen3", "qwen3_moe"))
TIED = [(*pair, "float32", {"tied": True}, {}) for pair in PAIRS]
ONE_TIED = [*{case[1]: case for case in reversed(TIED)}.values()]  # of each format
QUICK = [(*pair, "bfloat16", {}, {}) for pair in PAIRS if pair[0] not in FORMATS_OF_KIN]
QUICK += [(each, names[0], "bfloat16", {}, {}) for each, names in FORMATS_OF_KIN.items()]
QUICK = [case for case in QUICK if case[:2] not in [tied[:2] for tied in ONE_TIED]] + ONE_TIED
QUICK += [(*pair, *SHARED) for pair in HOLD_SHARED] + [(*pair, *LEADING) for pair in HOLD_DENSE]
SLOW = [(*pair, "bfloat16", {}, {}) for pair in PAIRS] + TIED
CASES = QUICK + [pytest.param(*c, marks=pytest.mark.slow) for c in SLOW if c not in QUICK]


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def test_every_family_has_its_formats_here():
    twins = {form.twin_of for form in FORMATS.values()}
    held = {
        name for name, family in FAMILIES.items() if not family.has_own_decoder or name in twins
    }
    assert set(FORMATS_OF) == held
    assert {name for names in FORMATS_OF.values() for name in names} == set(STOCK)


@pytest.mark.parametrize(
    ("family", "target", "dtype", "options", "split"),
    CASES,
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_stock_transformers_computes_the_masked_model(
    family, target, dtype, options, split, dense_of, exported, tokens_BT, tmp_path
):
    dense = dense_of(family, dtype=dtype, **SETTINGS[family], **options)
    made = exported(dense, {"dtype": getattr(torch, dtype), **split}, format=target)
    record, layout = made.record, made.layout
    module = "granitemoeshared" if family == "granite" and "shared_size" in split else target
    module = module.removesuffix("_text")
    assert record.verification["loaded_class"].startswith(f"transformers.models.{module}.")
    assert (record.verification["dtype"], record.problems) == (dtype, [])
    for rows in (record.verification["layers"], record.routers):
        assert [row["layer"] for row in rows] == list(layout.moe_layers)
    assert (record.shared_size, record.expert_size) == (split.get("shared_size", 0), 8)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    reference = masked_logits(dense, layout, tokens_BT)
    most = 3e-3 if dtype == "float32" else 8e-3
    stock = AutoModelForCausalLM.from_pretrained(made.folder, dtype=torch.float32)
    assert relative_error(logits_of(stock, tokens_BT), reference) < most
    with_cache = step_by_step(stock, tokens_BT[:, :16])
    assert relative_error(with_cache, reference[:, :16]) < most
    if record.active_experts_editable:
        all_on = {record.active_experts_key: layout.num_experts}
        full = stock_logits(made.folder, tokens_BT, **all_on)
        assert relative_error(full, logits_of(dense.model, tokens_BT)) < most


@pytest.mark.parametrize(
    ("family", "target"),
    [(each, target) for each in FORMATS_OF for target in STOCK if (each, target) not in PAIRS],
)
def test_a_format_that_cannot_hold_a_model_says_why_and_which_can(family, target, tiny_dense):
    dense = describe_dense(str(tiny_dense(family, **SETTINGS[family])))
    why = rf"{target} (cannot hold|requires)\. Formats that can hold it: {FORMATS_OF[family][0]}"
    with pytest.raises(UserError, match=why):
        require_exportable(dense, (SPLIT,), ExportConfig(format=target))


IN_A_WINDOW = {"sliding_window": 40, **rope("dynamic", factor=2.0)}
LINEAR_IN_A_WINDOW = {"sliding_window": 40, **rope("linear", factor=4.0)}
GLM, MIXTRAL = {"format": "glm4_moe"}, {"format": "mixtral"}


@pytest.mark.parametrize(
    ("family", "options", "split", "config", "words"),
    [
        ("llama", {}, {"expert_size": 6, "shared_size": 24}, MIXTRAL, "shared expert"),
        ("llama", {}, {"first_dense_layers": 1}, MIXTRAL, "dense layers"),
        ("llama", {}, {"first_dense_layers": 2}, {}, r"first_dense_layers is 2.*Choose 0 to 1"),
        ("granite", {}, {"first_dense_layers": 1}, {}, "dense layers, which granitemoe cannot"),
        ("granite", {}, {"num_experts": 16, "expert_size": 6}, {}, r"is 6.*multiples of 4"),
        ("llama", {}, {"num_experts": 24, "expert_size": 4}, {"export_dtype": "bfloat16"}, "of 8"),
        ("llama", {}, {"num_experts": 1, "expert_size": 96, "active_experts": 1}, {}, "at least 2"),
        ("llama", {}, {}, {"format": "glm4-moe"}, "Did you mean glm4_moe"),
        ("llama", {"dtype": "float64"}, {}, {}, r"float64.*Set --export-dtype to one of them"),
        ("llama", {"dtype": "float16"}, {}, {}, None),
        ("mistral", IN_A_WINDOW, {}, GLM, "together with a sliding window.*mixtral"),
        ("mistral", IN_A_WINDOW, {}, MIXTRAL, None),
        ("mistral", LINEAR_IN_A_WINDOW, {}, GLM, "together with a sliding window.*mixtral"),
        ("mistral", LINEAR_IN_A_WINDOW, {}, MIXTRAL, None),
        ("phi3", {"partial_rotary_factor": 0.5}, {}, MIXTRAL, "partly rotated heads.*glm4_moe"),
        ("phi3", {"partial_rotary_factor": 0.5}, {}, {}, None),
    ],
)
def test_what_cannot_be_exported_is_refused_in_a_line(
    family, options, split, config, words, tiny_dense
):
    dense = describe_dense(str(tiny_dense(family, **options)))
    changed, export_config = replace(SPLIT, **split), ExportConfig(**config)
    if words is None:
        assert require_exportable(dense, (changed,), export_config) == torch.float32
        return
    with pytest.raises(UserError, match=words) as caught:
        require_exportable(dense, (changed,), export_config)
    assert "\n" not in str(caught.value)


def test_dropped_neurons_are_gone_and_all_others_are_as_they_were(
    dense_of, layout_of, exported, tokens_BT
):
    """Oracle: the dense model whose W_down has no columns for them, all other experts on."""
    dense = dense_of("llama", num_hidden_layers=3, intermediate_size=120)
    layout = layout_of(dense, shared_size=24, dense_layers=1)
    layout = without_last(layout, 4)
    layout = replace(layout, active_experts=layout.num_experts)
    gone = layout.expert_of_neuron_LN == DROPPED
    assert gone.sum() == 4 * layout.expert_size * len(layout.moe_layers) > 0
    made = exported(dense, layout, format="glm4_moe")
    record, parameters = made.record, made.record.parameters
    assert (record.num_experts, record.verification["dense_error"]) == (8, None)
    neurons = 3 * dense.widths.model * int(gone.sum())
    routers = parameters["active_with_routers"] - parameters["active"]
    assert parameters["stored"] == parameters["dense"] + routers - neurons
    assert parameters["active"] == parameters["dense"] - neurons
    with torch.no_grad():
        for layer, gone_N in zip(dense.family.layers(dense.model), gone, strict=True):
            layer.mlp.down_proj.weight[:, gone_N] = 0
    actual = stock_logits(made.folder, tokens_BT)
    assert relative_error(actual, logits_of(dense.model, tokens_BT)) < 3e-3
    assert "are left out" in (made.folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("family", "options", "target"),
    [
        ("mistral", {}, "glm4_moe"),
        # Mixtral would slide in every layer.
        ("cwm", {"layer_types": ["full_attention", "sliding_attention"]}, "auto"),
    ],
)
def test_a_sliding_window_becomes_the_context_limit(
    family, options, target, dense_of, exported, tokens_BT
):
    made = exported(dense_of(family, sliding_window=40, **options), format=target)
    assert made.record.format == "glm4_moe"
    assert config_of(made.folder)["max_position_embeddings"] == 40
    assert any("Beyond 40 tokens" in note for note in made.record.notes)

    def error(tokens_BT):
        reference = masked_logits(made.dense, made.layout, tokens_BT)
        return relative_error(stock_logits(made.folder, tokens_BT), reference)

    assert error(tokens_BT[:, :40]) < 1e-3
    assert error(tokens_BT) > 0.01  # the limit is needed: beyond the window the two models differ


def test_auto_keeps_the_whole_context_where_a_format_does(dense_of, exported, tokens_BT):
    dense = dense_of("mistral", sliding_window=40)
    made = exported(dense, format="auto")
    config = config_of(made.folder)
    assert (config["model_type"], config["sliding_window"]) == ("mixtral", 40)
    assert config["max_position_embeddings"] == dense.widths.context == 256
    assert not any("context is lowered" in note for note in made.record.notes)
    reference = masked_logits(made.dense, made.layout, tokens_BT)
    assert relative_error(stock_logits(made.folder, tokens_BT), reference) < 3e-3
    split = {"shared_size": 24, "num_experts": 9}  # no format has both a shared expert and a window
    shared = exported(dense, split, out="shared", format="auto").record
    assert shared.format == "glm4_moe"
    assert any("context is lowered from 256 to 40" in note for note in shared.notes)


def test_the_2_of_glm4_moe_is_in_its_weights_for_servers_that_drop_it_in_float16(
    dense_of, exported
):
    """vLLM in float16 multiplies by no routed_scaling_factor: it gave perplexity 70 for 25."""
    dense = dense_of("qwen2", tied=True, dtype="bfloat16")
    made = exported(dense, {"dtype": torch.bfloat16})
    config = config_of(made.folder)
    expected = {
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "routed_scaling_factor": 1.0,
        "partial_rotary_factor": 1.0,
        "eos_token_id": dense.config.eos_token_id,
    }
    assert {key: config[key] for key in expected} == expected
    assert config["rope_parameters"]["rope_theta"] == config["rope_theta"]
    assert "down projections times two (exact)" in made.record.exactness
    before, after = weights_of(dense.folder), weights_of(made.folder)
    down, (first, *_) = "model.layers.1.mlp.{}down_proj.weight", made.layout.neurons_of_expert(1)
    assert torch.equal(after[down.format("experts.0.")], 2 * before[down.format("")][:, first])
    assert all(torch.equal(before[name], after[name]) for name in before if ".mlp." not in name)
    assert torch.equal(after["lm_head.weight"], after["model.embed_tokens.weight"])


def with_tensors(source, folder, change):
    """The description of a copy of a checkpoint that has further tensors, or others."""
    shutil.copytree(source, folder)
    with rewritten(folder) as tensors:
        tensors.update(change)
    return describe_dense(str(folder))


def test_source_keeps_the_dtype_of_every_tensor(tiny_dense, exported, tmp_path):
    source = tiny_dense("llama", dtype="bfloat16")
    norms = [name for name in weights_of(source) if name.endswith("norm.weight")]
    fine = {name: 1 + 1e-4 * torch.randn(64) for name in norms}
    made = exported(with_tensors(source, tmp_path / "dense", fine))
    after = weights_of(made.folder)
    assert all(torch.equal(after[name], tensor) for name, tensor in fine.items())
    assert after["model.embed_tokens.weight"].dtype == torch.bfloat16
    # Routers are rounded to the dtype of the experts.
    scale = 2.0 ** -made.record.routers[1]["exponent"]
    expected = made.layout.router_LED[1].bfloat16().double() * scale
    assert torch.equal(after["model.layers.1.mlp.gate.weight"].double(), expected)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_float16_weights_are_written_exactly_as_float32(family, exported, dense_of):
    """Times two, if they are of down projections; and the routers are exact, too."""
    dense = dense_of(family, dtype="float16")
    made = exported(dense)
    assert (made.record.dtype, made.record.problems) == ("float32", [])
    assert "which is exact" in made.record.notes[0]
    written, stored = weights_of(made.folder), weights_of(dense.folder)
    assert {each.dtype for each in written.values()} == {torch.float32}
    layout = made.layout
    for layer in layout.moe_layers:
        for expert, neurons_S in enumerate(layout.neurons_of_expert(layer)):
            prefix = f"model.layers.{layer}.mlp"
            rows_SD = written[f"{prefix}.experts.{expert}.gate_proj.weight"]
            assert torch.equal(rows_SD, stored[f"{prefix}.gate_proj.weight"][neurons_S].float())
            columns_DS = written[f"{prefix}.experts.{expert}.down_proj.weight"]
            dense_DS = stored[f"{prefix}.down_proj.weight"][:, neurons_S].float()
            assert torch.equal(columns_DS, 2 * dense_DS)
        scale = {each["layer"]: 2.0 ** -each["exponent"] for each in made.record.routers}[layer]
        assert torch.equal(written[f"{prefix}.gate.weight"], layout.router_LED[layer] * scale)


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("model.layers.0.self_attn.o_proj.bias", torch.ones(64), "is stored .* no place"),
        ("model.layers.1.mlp.up_proj.weight", torch.ones(96, 64, dtype=torch.int8), "stored as I8"),
        ("lm_head.weight", torch.ones(264, 64), "differ, but .* Set tie_word_embeddings to false"),
    ],
)
def test_weights_with_no_place_are_refused(name, tensor, words, tiny_dense, exported, tmp_path):
    """Transformers runs all three, and does not tie a head that is stored and differs."""
    source = tiny_dense("llama", tied=name.startswith("lm_head"))
    dense = describe_dense(str(shutil.copytree(source, tmp_path / "dense")))
    with rewritten(dense.folder) as tensors:
        tensors[name] = tensor
    stock = AutoModelForCausalLM.from_pretrained(dense.folder)
    assert stock.lm_head.weight is not stock.model.embed_tokens.weight
    for reads in (exported, lambda dense: describe_dense(dense.source)):
        with pytest.raises(UserError, match=f"{name}.*{words}"):
            reads(dense)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_the_folder_is_complete_and_small_shards_load(tiny_dense, exported, tmp_path):
    folder = shutil.copytree(tiny_dense("mistral"), tmp_path / "dense")
    generation = {"bos_token_id": 0, "eos_token_id": 1, "max_new_tokens": 7}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    dense = loaded(folder)
    small = {"max_shard_gib": 40_000 / 2**30, "export_dtype": "bfloat16"}
    made = exported(dense, out="made/below/out", **small)
    record, out = made.record, made.folder
    assert "copied as bfloat16" in record.exactness
    assert len(record.files) > 3
    assert record.files[0] == f"model-00001-of-{len(record.files):05d}.safetensors"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    tensors = weights_of(out)
    assert set(index["weight_map"]) == set(tensors)
    assert record.total_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert GenerationConfig.from_pretrained(out).max_new_tokens == 7
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer("three crows").input_ids == dense.tokenizer("three crows").input_ids
    assert type(record).load(out) == record


def reload(folder):
    """Load an export where every import of dotmoe fails, installed or not."""
    sys.modules |= {name: None for name in sys.modules if name.split(".")[0] == "dotmoe"}
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = AutoTokenizer.from_pretrained(folder)("Once", return_tensors="pt").input_ids
    made = model.generate(prompt, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert (type(model).__name__, made.shape[1]) == ("Glm4MoeForCausalLM", prompt.shape[1] + 5)


def test_the_export_loads_where_dotmoe_cannot_be_imported(exported):
    on_ranks(1, reload, exported("qwen3").folder)  # a fork


def test_an_existing_folder_and_no_text_are_refused(exported, tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    for out in (".", "mine.txt"):
        with pytest.raises(UserError, match="exists already"):
            exported(out=out)
    with pytest.raises(UserError, match="No tokens are left"):
        exported(text_BT=torch.zeros(0, 16, dtype=torch.long))
    assert [path.name for path in tmp_path.rglob("*")] == ["mine.txt"]
