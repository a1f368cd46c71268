"""The student and its losses. Oracles: stock Transformers, the masked model, autograd, PEFT."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from dotmoe.common.sharded import full_tensor, local_part
from dotmoe.method.config import FinetuneConfig
from dotmoe.method.finetuning import Finetuning, write_student
from dotmoe.method.layout import DROPPED
from dotmoe.method.masked import masked_by
from dotmoe.method.router import router_losses
from dotmoe.models.family import FAMILIES
from dotmoe.models.scoring import hidden_states
from runs import loaded, slow_but, weights_of

PLAIN = FinetuneConfig(batch_size=4, micro_batch_size=4)
QUICK = ("llama", "phi3", "granite", "olmo2", "gemma2", "cohere2", "glm4", "lfm2", "qwen3_5_text")
"""Families that differ most; that each is trained as it is masked, all show below."""
WEIGHTS = {"kl": 0.7, "ce": 0.4, "balance": 0.3, "z": 0.2}


def task_of(student, blocks, config=PLAIN, teacher=None):
    return Finetuning(student, teacher, blocks, config, seed=0)


def logits_of(student, tokens):
    return student(lambda: student.model(input_ids=tokens).logits)


def gradients(student):
    return {name: full_tensor(p.grad) for name, p in student.trained().items()}


@pytest.mark.parametrize("family", slow_but(QUICK, FAMILIES))
def test_with_all_experts_gradients_are_those_of_the_stock_dense_model(
    family, tiny_dense, layout, blocks, new_student, tmp_path
):
    folder = tiny_dense(family, tied=family == "llama")
    stock = loaded(folder).model.requires_grad_(True)
    student = new_student(folder, layout=replace(layout, active_experts=layout.num_experts))
    task = task_of(student, blocks, replace(PLAIN, balance_weight=0.0))
    tokens = blocks.batch(0, 4, 0)
    loss = F.cross_entropy(
        stock(input_ids=tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    )
    loss.backward()
    assert task.accumulate_gradients(0)["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for parameter in student.trained().values():  # written as weights, they have the stock names
        parameter.data = parameter.grad
    write_student(student, layout, tmp_path / "gradients")
    for name, gradient in weights_of(tmp_path / "gradients").items():
        theirs = stock.get_parameter(name).grad
        torch.testing.assert_close(gradient, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("has_own_teacher", [True, False])
def test_the_gradient_is_that_of_the_weighted_sum_of_all_losses(
    has_own_teacher, tiny_dense, layout, blocks, new_student
):
    """With a teacher beside it; and the weights of a frozen student with all experts on."""
    weights = {f"{n}_loss_weight" if n == "z" else f"{n}_weight": w for n, w in WEIGHTS.items()}
    train = "everything" if has_own_teacher else "lora"
    config = replace(PLAIN, train=train, micro_batch_size=2, **weights)
    folder = tiny_dense("granite")
    student, teacher = new_student(folder, config), loaded(folder)
    with torch.no_grad():
        for parameter in student.trained().values():
            local_part(parameter).add_(0.05 * torch.randn(parameter.shape))
    task = task_of(student, blocks, config, teacher if has_own_teacher else None)
    metrics, found = task.accumulate_gradients(0), gradients(student)
    student.zero_grad()

    def losses_of(tokens):
        with router_losses() as losses:
            logits = logits_of(student, tokens)
        of_routers = losses()
        with torch.no_grad():
            wanted = teacher.model(input_ids=tokens).logits.log_softmax(-1).flatten(0, 1)
        ours = logits.log_softmax(-1).flatten(0, 1)
        kl = F.kl_div(ours, wanted, log_target=True, reduction="batchmean")
        ce = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        return {"kl": kl, "ce": ce, **of_routers}

    first, second = (losses_of(tokens) for tokens in blocks.batch(0, 4, 0).split(2))
    losses = {name: (first[name] + second[name]) / 2 for name in WEIGHTS}
    losses["loss"] = sum(weight * losses[name] for name, weight in WEIGHTS.items())
    losses["loss"].backward()
    assert metrics == pytest.approx({name: loss.item() for name, loss in losses.items()}, rel=1e-4)
    assert metrics["kl"] > 0.01
    for name, expected in gradients(student).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "is_special"),
    [*((each, False) for each in FAMILIES), ("llama", True), ("phi3", True)],
)
def test_an_untrained_student_is_the_masked_model_and_written_as_its_checkpoint(
    family, is_special, tiny_dense, layout_of, new_student, tmp_path
):
    """Also with a tied head, a layer that stays dense and a shared expert."""
    folder = tiny_dense(family, tied=is_special, dtype="bfloat16")
    dense, special = loaded(folder), {"shared_size": 24, "dense_layers": 1} if is_special else {}
    layout = layout_of(dense, 6, active_experts=2, **special)
    student, tokens = new_student(folder, layout=layout), torch.randint(2, 250, (2, 24))
    with torch.no_grad(), masked_by(dense, layout):
        expected = dense.model(input_ids=tokens).logits
    torch.testing.assert_close(logits_of(student, tokens), expected, rtol=1e-5, atol=5e-5)
    assert len(student.ffns) == (1 if is_special else 2)
    trained = write_student(student, layout, tmp_path / "model")
    written, stored = weights_of(tmp_path / "model"), load_file(folder / "model.safetensors")
    assert written.keys() == stored.keys()
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert all(torch.equal(written[name], tensor) for name, tensor in stored.items())
    centred = layout.router_LED - layout.router_LED.mean(dim=1, keepdim=True)
    torch.testing.assert_close(trained.router_LED[-1], centred[-1])


@pytest.mark.parametrize("train", ["everything", "experts", "lora"])
def test_what_is_trained_is_float32_and_what_stays_has_the_models_dtype(
    train, tiny_dense, blocks, new_student
):
    """And the residual stream has it, on one rank as on many."""
    folder, config = tiny_dense("phi3", dtype="bfloat16"), replace(PLAIN, train=train)
    student = new_student(folder, config, "bfloat16")
    for parameter in student.model.parameters():
        assert parameter.dtype == (torch.float32 if parameter.requires_grad else torch.bfloat16)
    task, seen = task_of(student, blocks, config), []
    student.dense.family.layers(student.model)[1].register_forward_pre_hook(
        lambda module, args: seen.append(args[0].dtype)
    )
    low = task.accumulate_gradients(0)["ce"]
    assert seen == [torch.bfloat16]
    assert {gradient.dtype for gradient in gradients(student).values()} == {torch.float32}
    wide = task_of(new_student(folder, config), blocks, config).accumulate_gradients(0)["ce"]
    assert low != wide
    assert low == pytest.approx(wide, rel=0.02)


@pytest.mark.parametrize("what", ["everything", "experts"])
@pytest.mark.parametrize("router_dtype", ["float32", "model"])
def test_routers_compute_in_their_dtype_and_are_trained_in_float32(
    router_dtype, what, tiny_dense, new_student, tokens_BT
):
    config = replace(PLAIN, router_dtype=router_dtype, train=what)
    student, seen = new_student(tiny_dense("llama"), config, "bfloat16"), []
    assert all(p.dtype == torch.float32 for p in student.trained().values())
    for ffn in student.ffns:
        ffn.router.register_forward_hook(
            lambda router, _, y: seen.append((router.weight_ED.dtype, y))
        )
    student(lambda: hidden_states(student.dense.model, tokens_BT))
    expected = torch.float32 if router_dtype == "float32" else torch.bfloat16
    for dtype, logits_TE in seen:
        assert (dtype, logits_TE.dtype) == (expected, torch.float32)
        assert torch.equal(logits_TE, logits_TE.to(expected).float())
    assert len(seen) == len(student.ffns)


def test_adapters_are_disabled_in_the_teacher_and_merged_as_peft_computes_them(
    tiny_dense, layout, blocks, new_student, tmp_path
):
    folder, tokens = tiny_dense("llama"), blocks.tokens_BT[:3].long()
    config = replace(PLAIN, train="lora", lora_rank=3, kl_weight=2.0)
    student = new_student(folder, config)
    names = set(student.trained())
    assert sum("mlp" in name and "lora" in name for name in names) == 2 * 3 * 2
    assert sum("self_attn" in name for name in names) == 2 * 4 * 2
    for name, parameter in student.trained().items():
        if "lora_A" in name:  # uniform, as PEFT starts them
            bound = parameter.shape[1] ** -0.5
            assert 0.8 * bound < full_tensor(parameter).abs().max() <= bound
        if "lora_B" in name:  # zero at the start, where adapters change nothing
            with torch.no_grad():
                local_part(parameter).add_(0.05 * torch.randn(parameter.shape))
    task, original = task_of(student, blocks, config), loaded(folder)
    with torch.no_grad():
        own = task.losses(tokens)["kl"]
        hidden = hidden_states(original.model, tokens).flatten(0, 1)
        task.teacher = lambda _: (hidden, original.model.lm_head.weight)
        given = task.losses(tokens)["kl"]
        before = logits_of(student, tokens)
    torch.testing.assert_close(own, given, rtol=1e-4, atol=1e-5)
    assert own > 1e-3
    trained = write_student(student, layout, tmp_path / "model")
    written = loaded(tmp_path / "model")
    with torch.no_grad(), masked_by(written, trained):
        after = written.model(input_ids=tokens).logits
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    with torch.no_grad(), masked_by(original, layout):
        assert (original.model(input_ids=tokens).logits - before).abs().max() > 1e-2


def test_replicas_meet_after_the_last_micro_batch_alone(tiny_dense, blocks, new_student):
    student, met = new_student(tiny_dense("llama", dtype="bfloat16"), dtype="bfloat16"), []
    student.set_requires_all_reduce = met.append
    task_of(student, blocks, replace(PLAIN, micro_batch_size=1)).accumulate_gradients(0)
    assert met == [False, False, False, True]


def test_no_copy_of_the_experts_waits_for_the_backward_pass(tiny_dense, new_student):
    """What a 16-bit product reads of weights that are trained in float32 is made again there."""
    student = new_student(tiny_dense("llama", dtype="bfloat16"), dtype="bfloat16")
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss = logits_of(student, torch.randint(2, 250, (1, 8))).sum()
    assert loss.requires_grad
    (size,) = {w.numel() for ffn in student.ffns for _, w, _ in ffn.weights()}
    held = [tensor for tensor in kept if tensor.numel() == size]
    assert len(held) == 2 * 3
    assert sum(tensor.untyped_storage().nbytes() for tensor in held) == 0


def test_a_student_without_some_neurons_is_written_as_a_checkpoint_of_all(
    tiny_dense, layout_of, new_student, tmp_path
):
    """As static pruning leaves it: what is dropped is zero in the files, and runs for no token."""
    folder = tiny_dense("llama")
    dense = loaded(folder)
    whole = layout_of(dense, 12, active_experts=3, shared_size=24)
    last = whole.num_experts - 1
    dropped_LN = whole.expert_of_neuron_LN == last
    layout = replace(
        whole,
        expert_of_neuron_LN=whole.expert_of_neuron_LN.masked_fill(dropped_LN, DROPPED),
        router_LED=whole.router_LED[:, :last],
    )
    tokens = torch.randint(2, 250, (2, 24))
    with torch.no_grad(), masked_by(dense, layout):
        expected = dense.model(input_ids=tokens).logits
    student = new_student(folder, layout=layout)
    write_student(student, layout, tmp_path / "model")
    written = loaded(tmp_path / "model")
    for layer, dropped_N in enumerate(dropped_LN):
        ours, theirs = (model.model.model.layers[layer].mlp for model in (written, dense))
        for name in ("gate_proj", "up_proj"):
            rows_ND, before_ND = getattr(ours, name).weight, getattr(theirs, name).weight
            assert torch.equal(rows_ND[~dropped_N], before_ND[~dropped_N])
            assert not rows_ND[dropped_N].any()
        assert torch.equal(
            ours.down_proj.weight[:, ~dropped_N], theirs.down_proj.weight[:, ~dropped_N]
        )
        assert not ours.down_proj.weight[:, dropped_N].any()
    with torch.no_grad(), masked_by(written, layout):
        found = written.model(input_ids=tokens).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
