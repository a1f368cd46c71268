"""The student's losses and gradients. Oracles: stock Transformers, the masked model, PEFT."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from dotmoe.finetune.config import FinetuneConfig
from dotmoe.finetune.student import Student, Taught, hidden_states
from dotmoe.finetune.written import write_student
from dotmoe.layout import ExpertLayout
from dotmoe.load import LoadConfig, load_dense
from dotmoe.moe.surgery import masked_by

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "granite", "olmo2", "phi3")


def loaded(folder):
    return load_dense(str(folder), LoadConfig())


def next_token_loss(logits_BTV, tokens_BT):
    return F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten())


@pytest.mark.parametrize("family", FAMILIES)
def test_with_all_experts_gradients_are_those_of_the_stock_dense_model(
    family, tiny_dense, layout, blocks
):
    folder = tiny_dense(family, tied=family == "llama")
    tokens = blocks.tokens_BT[:3].long()
    stock = loaded(folder).model.requires_grad_(True)
    loss = next_token_loss(stock(input_ids=tokens).logits, tokens)
    loss.backward()
    whole = layout.with_active_experts(layout.num_experts)
    student = Student(loaded(folder), whole, FinetuneConfig(), seed=0)
    found = student(tokens, None, FinetuneConfig())
    found.total.backward()
    torch.testing.assert_close(found.total, loss)
    theirs = {name: p.grad for name, p in stock.named_parameters()}
    for name, parameter in student.model.named_parameters():
        if ".mlp." not in name:
            torch.testing.assert_close(parameter.grad, theirs[name], rtol=1e-3, atol=1e-5)
    for index, ffn in enumerate(student.ffns):
        prefix, neurons = f"model.layers.{index}.mlp", layout.neurons_of_expert(index)
        if family == "phi3":
            gate, up = theirs[f"{prefix}.gate_up_proj.weight"].chunk(2)
        else:
            gate, up = (theirs[f"{prefix}.{part}_proj.weight"] for part in ("gate", "up"))
        down = theirs[f"{prefix}.down_proj.weight"].T
        ours = (ffn.gate_ESD, ffn.up_ESD, ffn.down_ESD)
        for parameter, expected in zip(ours, (gate, up, down), strict=True):
            torch.testing.assert_close(parameter.grad, expected[neurons], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("family", "tied"), [*((f, False) for f in FAMILIES), ("llama", True)])
def test_an_untrained_student_is_written_as_the_checkpoint_it_came_from(
    family, tied, tiny_dense, layout, tmp_path
):
    folder = tiny_dense(family, tied=tied, dtype="bfloat16")
    student = Student(loaded(folder), layout, FinetuneConfig(), seed=0)
    write_student(student, layout, tmp_path, router_dtype=torch.bfloat16)
    written = {}
    for file in sorted((tmp_path / "model").glob("*.safetensors")):
        written |= load_file(file)
    stored = load_file(folder / "model.safetensors")
    assert written.keys() == stored.keys()
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert all(torch.equal(written[name], tensor) for name, tensor in stored.items())
    routers = ExpertLayout.load(tmp_path / "layout.safetensors").router_LED
    assert torch.equal(routers, routers.bfloat16().float())
    centred = layout.router_LED - layout.router_LED.mean(dim=1, keepdim=True)
    torch.testing.assert_close(routers, centred, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("train", ["router", "lora"])
def test_a_frozen_student_is_its_own_teacher(train, tiny_dense, layout, blocks):
    if train == "lora":
        pytest.importorskip("peft")
    folder, tokens = tiny_dense("granite"), blocks.tokens_BT[:3].long()
    config = FinetuneConfig(train=train, kl_weight=2.0)
    student = Student(loaded(folder), layout, config, seed=0)
    for name, parameter in student.trained().items():
        if "lora_B" in name:  # zero at the start, where adapters change nothing
            torch.nn.init.normal_(parameter, std=0.02)
    teacher = loaded(folder)
    with torch.no_grad():
        other = Taught(hidden_states(teacher, tokens), teacher.family.head(teacher.model).weight)
        own, given = student(tokens, None, config), student(tokens, other, config)
        expected = teacher.model(input_ids=tokens).logits.flatten(0, 1).log_softmax(1)
        found = student.model(input_ids=tokens).logits.flatten(0, 1).log_softmax(1)
    kl = F.kl_div(found, expected, log_target=True, reduction="batchmean")
    torch.testing.assert_close(own.kl, kl, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(given.kl, kl, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(own.total, own.ce + 2 * kl, rtol=1e-4, atol=1e-5)
    assert kl > 1e-3


def test_merged_adapters_compute_what_peft_computed(tiny_dense, layout, blocks, tmp_path):
    pytest.importorskip("peft")
    dense, tokens = loaded(tiny_dense("llama")), blocks.tokens_BT[:3].long()
    config = FinetuneConfig(train="lora", lora_rank=3)
    student = Student(dense, layout, config, seed=0)
    names = set(student.trained())
    assert sum("mlp" in name and "lora" in name for name in names) == 2 * 3 * 2
    assert sum("self_attn" in name for name in names) == 2 * 4 * 2
    for name, parameter in student.trained().items():
        if "lora_A" in name:  # uniform, as PEFT starts them
            bound = parameter.shape[1] ** -0.5
            assert 0.8 * bound < parameter.abs().max() <= bound
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    with torch.no_grad():
        before = student.model(input_ids=tokens).logits
    write_student(student, layout, tmp_path, router_dtype=torch.float32)
    trained = ExpertLayout.load(tmp_path / "layout.safetensors")
    written = loaded(tmp_path / "model")
    with torch.no_grad(), masked_by(written, trained):
        after = written.model(input_ids=tokens).logits
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    original = loaded(tiny_dense("llama"))
    with torch.no_grad(), masked_by(original, layout):
        assert (original.model(input_ids=tokens).logits - before).abs().max() > 1e-2


def test_weights_that_are_trained_are_float32_and_computed_in_the_models_dtype(
    tiny_dense, layout, blocks
):
    folder, tokens = tiny_dense("llama", dtype="bfloat16"), blocks.tokens_BT[:3].long()
    low = load_dense(str(folder), LoadConfig(dtype="bfloat16"))
    student = Student(low, layout, FinetuneConfig(), seed=0)
    assert all(p.dtype == torch.float32 for p in student.trained().values())
    wide = Student(loaded(folder), layout, FinetuneConfig(), seed=0)
    found, expected = (s(tokens, None, FinetuneConfig()) for s in (student, wide))
    found.total.backward()
    assert found.ce != expected.ce
    torch.testing.assert_close(found.ce, expected.ce, rtol=0.02, atol=0.02)
    frozen = replace(FinetuneConfig(), train="router")
    student = Student(load_dense(str(folder), LoadConfig(dtype="bfloat16")), layout, frozen, seed=0)
    assert student.ffns[0].gate_ESD.dtype == torch.bfloat16
    assert student.ffns[0].router.weight_ED.dtype == torch.float32
