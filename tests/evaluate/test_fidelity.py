"""Distance to the dense model. Oracle: whole hidden states and logits in torch."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from dotmoe.common.errors import UserError
from dotmoe.measure.evaluate import EvaluateConfig, evaluate
from dotmoe.method.masked import masked_by
from dotmoe.models import scoring
from dotmoe.models.config import LoadConfig

FORMATS = {"llama": "glm4_moe", "qwen2": "glm4_moe", "granite": "granitemoe", "olmo2": "flex_olmo"}


def measured(model, corpus, **options):
    load = LoadConfig(device="cpu")
    config = EvaluateConfig(model=str(model), fidelity=True, corpus=corpus, load=load, **options)
    return evaluate(config)["fidelity"]


def rows_of(case):
    return torch.tensor(case.ids[: len(case.ids) // 48 * 48]).view(-1, 48)


def compared(actual, dense):
    cosine = F.cosine_similarity(actual.double(), dense.double(), dim=-1).mean()
    return {"cosine": float(cosine), "mse": float(F.mse_loss(actual.double(), dense.double()))}


@pytest.mark.parametrize("family", FORMATS)
def test_every_figure_is_what_torch_computes_from_whole_logits(family, exported, monkeypatch):
    monkeypatch.setattr(scoring, "CHUNK_LOGITS", 264 * 7)
    case = exported(family, format=FORMATS[family])
    found = measured(case.folder, case.corpus, against=case.dense.source)
    with torch.no_grad():
        moe, dense = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(
                input_ids=rows_of(case), output_hidden_states=True
            )
            for folder in (case.folder, case.dense.folder)
        )
    before, after = found["before_head"], found["after_head"]
    expected = compared(moe.hidden_states[-1], dense.hidden_states[-1])
    assert {key: before[key] for key in expected} == pytest.approx(expected, rel=1e-5)
    expected = compared(moe.logits, dense.logits)
    expected["relative_mse"] = expected["mse"] / float(dense.logits.double().square().mean())
    assert after == pytest.approx(expected, rel=1e-5)
    chances = [torch.distributions.Categorical(logits=each.logits) for each in (dense, moe)]
    kl = float(torch.distributions.kl_divergence(*chances).mean())
    assert 0.01 < found["kl"] == pytest.approx(kl, rel=1e-4)
    by_window = torch.distributions.kl_divergence(*chances).mean(dim=1)
    assert found["window_kls"] == pytest.approx(by_window.tolist(), rel=1e-3)
    stderr = float(by_window.std()) / len(by_window) ** 0.5
    assert found["kl_stderr"] == pytest.approx(stderr, rel=1e-3)
    same = (moe.logits.argmax(-1) == dense.logits.argmax(-1)).double().mean()
    assert found["top1_agreement"] == pytest.approx(float(same))
    assert found["tokens"] == rows_of(case).numel()
    if family not in ("llama", "granite"):
        return
    layers, seen = case.dense.family.layers(case.dense.model), []
    for layer in layers:
        layer.mlp.register_forward_hook(lambda mlp, inputs, output: seen.append((*inputs, output)))
    with torch.no_grad():
        case.dense.model(input_ids=rows_of(case))
        with masked_by(case.dense, case.layout):
            for each, (x, output) in zip(found["ffn"], list(seen), strict=True):
                expected = compared(layers[each["layer"]].mlp(x), output)
                assert {key: each[key] for key in expected} == pytest.approx(expected, rel=5e-3)


def test_with_all_experts_on_it_is_the_dense_model(exported):
    case = exported(layout={"active_experts": 12})
    found = measured(case.folder, case.corpus, against=case.dense.source)
    assert found["kl"] < 1e-4
    assert found["top1_agreement"] > 0.99
    assert all(each["relative_mse"] < 1e-5 for each in (found["before_head"], *found["ffn"]))
    with pytest.raises(UserError, match=r"local model llama.* Name it with --against"):
        measured(case.folder, case.corpus)


def test_a_model_that_is_no_export_needs_one_to_be_compared_with_that_fits(exported, tiny_dense):
    case = exported()
    dense = case.dense.folder
    itself = measured(dense, case.corpus, against=str(dense))
    assert itself["kl"] == pytest.approx(0, abs=1e-6)
    assert (itself["before_head"]["mse"], itself["ffn"]) == (0, [])
    with pytest.raises(UserError, match="--against"):
        measured(dense, case.corpus)
    other = str(tiny_dense("llama", vocab_size=272))
    with pytest.raises(UserError, match="vocab_size is 264 in the model and 272"):
        measured(case.folder, case.corpus, against=other)


def test_a_finetuned_run_is_compared_with_the_dense_model_and_not_with_its_own_weights(
    finished, finetuned, exported
):
    corpus, trained = exported().corpus, finetuned.folder / "4_finetune" / "model"
    found = measured(finetuned.folder, corpus)
    assert found["against"] == str(finished.source)
    assert found["kl"] != measured(finetuned.folder, corpus, against=str(trained))["kl"]
