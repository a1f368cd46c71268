"""Distance to the dense model. Oracle: whole hidden states and logits in torch."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from dotmoe.errors import UserError
from dotmoe.evaluate import EvaluateConfig, TextConfig, evaluate, scoring
from dotmoe.export import ExportConfig, export, set_active_experts
from dotmoe.layout import ExpertLayout
from dotmoe.load import LoadConfig, load_dense
from dotmoe.moe.surgery import masked_by

TEXT = "The crows counted seven hills and seven valleys, and went on counting until dusk. " * 8
WINDOW = 48
FORMATS = {"llama": "glm4_moe", "qwen2": "qwen2_moe", "granite": "granitemoe", "olmo2": "flex_olmo"}


def made(family, tiny_dense, tmp_path):
    """A dense model, a random layout with k = 3 of 12 experts, its export, and a text."""
    dense = load_dense(str(tiny_dense(family)), LoadConfig(device="cpu"))
    layout = ExpertLayout(
        expert_of_neuron_LN=torch.stack([torch.randperm(96) % 12 for _ in range(2)]),
        router_LED=torch.randn(2, 12, 64) / 8,
        active_experts=3,
    )
    ids = torch.tensor(dense.tokenizer(TEXT).input_ids[:384]).view(4, 96)
    config = ExportConfig(format=FORMATS.get(family, "auto"))
    export(dense, layout, tmp_path / "out", config, ids)
    (tmp_path / "text.txt").write_text(TEXT)
    return SimpleNamespace(dense=dense, layout=layout, folder=tmp_path / "out", root=tmp_path)


@pytest.fixture
def case(tiny_dense, tmp_path):
    return made("llama", tiny_dense, tmp_path)


def measured(case, **options):
    corpus = TextConfig(text=(str(case.root / "text.txt"),), window=WINDOW, batch_size=3)
    load = LoadConfig(device="cpu")
    model = str(case.folder)
    return evaluate(EvaluateConfig(model=model, fidelity=True, corpus=corpus, load=load, **options))


def rows_of(case):
    ids = torch.tensor(case.dense.tokenizer(TEXT).input_ids)
    return ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)


def compared(actual, dense):
    cosine = F.cosine_similarity(actual.double(), dense.double(), dim=-1).mean()
    return float(cosine), float(F.mse_loss(actual.double(), dense.double()))


@pytest.mark.parametrize("family", FORMATS)
def test_every_figure_is_what_torch_computes_from_whole_logits(
    family, tiny_dense, tmp_path, monkeypatch
):
    monkeypatch.setattr(scoring, "CHUNK_LOGITS", 264 * 7)
    case = made(family, tiny_dense, tmp_path)
    found = measured(case)
    models = {
        "moe": AutoModelForCausalLM.from_pretrained(case.folder, dtype=torch.float32),
        "dense": AutoModelForCausalLM.from_pretrained(case.dense.folder, dtype=torch.float32),
    }
    with torch.no_grad():
        outputs = {
            name: model(input_ids=rows_of(case), output_hidden_states=True)
            for name, model in models.items()
        }
    hidden = {name: output.hidden_states[-1] for name, output in outputs.items()}
    logits = {name: output.logits for name, output in outputs.items()}
    cosine, mse = compared(hidden["moe"], hidden["dense"])
    assert found["before_head"]["cosine"] == pytest.approx(cosine, rel=1e-5)
    assert found["before_head"]["mse"] == pytest.approx(mse, rel=1e-5)
    cosine, mse = compared(logits["moe"], logits["dense"])
    assert found["after_head"]["cosine"] == pytest.approx(cosine, rel=1e-5)
    assert found["after_head"]["mse"] == pytest.approx(mse, rel=1e-5)
    size = float(logits["dense"].double().square().mean())
    assert found["after_head"]["relative_mse"] == pytest.approx(mse / size, rel=1e-5)
    chances = {name: torch.distributions.Categorical(logits=each) for name, each in logits.items()}
    kl = float(torch.distributions.kl_divergence(chances["dense"], chances["moe"]).mean())
    assert found["kl"] == pytest.approx(kl, rel=1e-4)
    same = (logits["moe"].argmax(-1) == logits["dense"].argmax(-1)).double().mean()
    assert found["top1_agreement"] == pytest.approx(float(same))
    assert found["tokens"] == rows_of(case).numel()
    assert found["kl"] > 0.01
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize("family", ["llama", "granite"])
def test_ffn_errors_are_those_of_the_masked_ffn_on_the_dense_input(family, tiny_dense, tmp_path):
    case = made(family, tiny_dense, tmp_path)
    found = measured(case)
    inputs, outputs, masked = {}, {}, {}

    def keep(layer):
        def hook(module, arguments, output):
            inputs[layer], outputs[layer] = arguments[0].clone(), output.clone()

        return hook

    ffns = [layer.mlp for layer in case.dense.family.layers(case.dense.model)]
    hooks = [ffn.register_forward_hook(keep(layer)) for layer, ffn in enumerate(ffns)]
    with torch.no_grad():
        case.dense.model(input_ids=rows_of(case))
        for hook in hooks:
            hook.remove()
        with masked_by(case.dense, case.layout):
            layers = case.dense.family.layers(case.dense.model)
            masked = {index: layers[index].mlp(inputs[index]) for index in inputs}
    for each in found["ffn"]:
        cosine, mse = compared(masked[each["layer"]], outputs[each["layer"]])
        assert each["mse"] == pytest.approx(mse, rel=5e-3)
        assert each["cosine"] == pytest.approx(cosine, rel=5e-3)
    assert found["mean_ffn_mse"] == pytest.approx(sum(f["mse"] for f in found["ffn"]) / 2)


def test_with_all_experts_on_it_is_the_dense_model(case):
    set_active_experts(case.folder, 12)
    found = measured(case)
    assert found["before_head"]["relative_mse"] < 1e-5
    assert found["kl"] < 1e-4
    assert found["top1_agreement"] > 0.99
    assert all(each["relative_mse"] < 1e-5 for each in found["ffn"])
    assert found["against"] == str(case.dense.source)


def test_a_model_beside_itself_has_no_distance_and_no_known_ffns(case):
    folder = str(case.dense.folder)
    itself = SimpleNamespace(**vars(case) | {"folder": folder})
    found = measured(itself, against=folder)
    assert found["kl"] == pytest.approx(0, abs=1e-6)
    assert found["before_head"]["mse"] == 0
    assert found["ffn"] == []
    assert found["mean_ffn_mse"] is None
    assert "no export" in found["ffn_left_out"]


def test_a_dense_model_that_is_not_named_or_does_not_fit_is_refused(case, tiny_dense):
    folder = str(case.dense.folder)
    with pytest.raises(UserError, match="--against"):
        measured(SimpleNamespace(**vars(case) | {"folder": folder}))
    other = tiny_dense("llama", vocab_size=272)
    with pytest.raises(UserError, match="vocab_size is 264 in the model and 272"):
        measured(case, against=str(other))


def test_a_finetuned_export_is_compared_with_the_dense_model_and_not_with_its_own_weights(
    case, tiny_dense
):
    for name, values in (
        ("convert", {"command": "convert", "model": str(case.dense.folder)}),
        ("finetune", {"command": "finetune", "run": str(case.root / "convert")}),
    ):
        (case.root / name).mkdir()
        (case.root / name / "config.json").write_text(json.dumps(values))
    trained = case.root / "finetune" / "4_finetune" / "model"
    shutil.copytree(tiny_dense("llama", rms_norm_eps=1e-2), trained)
    dense = load_dense(str(trained), LoadConfig(device="cpu"))
    ids = torch.tensor(dense.tokenizer(TEXT).input_ids[:384]).view(4, 96)
    export(dense, case.layout, case.root / "finetune" / "5_export", ExportConfig(), ids)
    finetuned = SimpleNamespace(**vars(case) | {"folder": case.root / "finetune"})
    found = measured(finetuned)
    assert found["against"] == str(case.dense.folder)
    assert found["kl"] == measured(finetuned, against=str(case.dense.folder))["kl"]
    assert found["kl"] != measured(finetuned, against=str(trained))["kl"]
