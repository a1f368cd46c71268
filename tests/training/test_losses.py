"""KL + CE by chunks. Oracle: PyTorch's own losses on full logits, differentiated by autograd."""

import pytest
import torch
import torch.nn.functional as F

from dotmoe.method import losses
from dotmoe.method.losses import IGNORED, distillation_loss, next_token_labels
from dotmoe.models.traits import Readout

T, D, V = 11, 5, 17


def tensors():
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, T, D, generator=generator, dtype=torch.float64).unbind()
    head = torch.randn(V, D, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, V, (T,), generator=generator)
    labels[[3, 10]] = IGNORED
    return student.requires_grad_(), teacher, head, labels


@pytest.mark.parametrize("has_teacher", [True, False])
@pytest.mark.parametrize("head_is_trained", [True, False])
@pytest.mark.parametrize("readout", [Readout(), Readout(0.4), Readout(1.5, cap=2.0)], ids=str)
def test_losses_and_gradients_equal_those_on_full_logits(
    has_teacher, head_is_trained, readout, monkeypatch
):
    monkeypatch.setattr(losses, "MAX_CHUNK_ELEMENTS", 3 * V)  # four chunks, the last partial
    student, teacher, teacher_head, labels = tensors()
    head = teacher_head
    if head_is_trained:
        head = (head + 0.3 * torch.randn(V, D, dtype=torch.float64)).requires_grad_()
    kl_weight = 2.0 if has_teacher else 0.0
    found = distillation_loss(
        student, (teacher, teacher_head) if has_teacher else None, head, labels, readout,
        kl_weight=kl_weight, ce_weight=0.7,
    )  # fmt: skip
    (found[0] * 3).backward()
    logits, target = (
        z * readout.factor if readout.cap is None else torch.tanh(z * readout.factor / 2.0) * 2.0
        for z in (student @ head.T, teacher @ teacher_head.T)
    )
    kl = F.kl_div(
        logits.log_softmax(1), target.log_softmax(1), log_target=True, reduction="batchmean"
    )
    ce = F.cross_entropy(logits, labels, ignore_index=IGNORED)
    total = kl_weight * kl + 0.7 * ce
    leaves = [student, head] if head_is_trained else [student]
    for leaf, expected in zip(leaves, torch.autograd.grad(total * 3, leaves), strict=True):
        assert torch.allclose(leaf.grad, expected, atol=1e-6)
    expected = (total, kl if has_teacher else torch.zeros(()), ce)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one.double(), other.double(), rtol=1e-5)


def test_the_gradient_of_a_16_bit_head_adds_up_in_float32(monkeypatch):
    """Over 64 chunks; added up in bfloat16 it is wrong by percents."""
    monkeypatch.setattr(losses, "MAX_CHUNK_ELEMENTS", 4 * V)
    student, head = torch.randn(256, D).bfloat16(), (0.1 * torch.randn(V, D)).bfloat16()
    head.requires_grad_()
    labels = torch.randint(0, V, (256,))
    distillation_loss(student, None, head, labels, kl_weight=0.0, ce_weight=1.0)[0].backward()
    exact = head.detach().double().requires_grad_()
    F.cross_entropy(student.double() @ exact.T, labels).backward()
    error = (head.grad.double() - exact.grad).norm() / exact.grad.norm()
    assert error < 4e-3  # one rounding of the sum


def test_the_share_of_a_micro_batch_is_not_rounded_to_16_bits():
    """1/12 in bfloat16 is 0.2 % too large."""
    student, head = torch.randn(256, D).bfloat16(), (0.1 * torch.randn(V, D)).bfloat16()
    labels, grads = torch.randint(V, (256,)), []
    for share in (1.0, 1 / 12):
        hidden = student.clone().requires_grad_()
        losses = distillation_loss(hidden, None, head, labels, kl_weight=0.0, ce_weight=1.0)
        (losses[0] * share).backward()
        grads.append(hidden.grad.double())
    assert float((grads[0] * grads[1]).sum() / grads[0].square().sum()) == pytest.approx(
        1 / 12, rel=5e-4
    )


def test_no_chunk_of_logits_exceeds_its_bound(monkeypatch):
    monkeypatch.setattr(losses, "MAX_CHUNK_ELEMENTS", 2 * V)
    student, teacher, head, labels = tensors()
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.shape[-1:] == (V,) and len(out) != D:
                largest = max(largest, out.numel())
            return out

    with Watch():
        distillation_loss(student, (teacher, None), head, labels, kl_weight=1.0, ce_weight=1.0)
    assert 0 < largest <= 2 * V


def test_labels_are_the_next_tokens_within_each_row():
    tokens = torch.tensor([[5, 6, 7], [1, 2, 3]])
    assert next_token_labels(tokens).tolist() == [6, 7, IGNORED, 2, 3, IGNORED]
