"""KL to the dense teacher plus cross-entropy, never holding tokens x vocabulary at once."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

IGNORED = -100
"""Label of a position that has no next token."""

MAX_CHUNK_ELEMENTS = 1 << 25
"""Logits of one chunk, per model: 128 MiB in float32."""

CPU_CHUNK_ROWS = 128
"""Tokens of one chunk on a CPU at most: its logits stay near the cache."""


class DistillationLoss(NamedTuple):
    """Losses in nats per token."""

    total: Float[Tensor, ""]
    """kl_weight * kl + ce_weight * ce; the only field with a gradient."""
    kl: Float[Tensor, ""]
    ce: Float[Tensor, ""]


def next_token_labels(tokens_BT: Int[Tensor, "B T"]) -> Int[Tensor, " BT"]:
    """Labels of a batch, flat: the next token, and `IGNORED` at the end of each row."""
    labels = torch.full_like(tokens_BT, IGNORED)
    labels[:, :-1] = tokens_BT[:, 1:]
    return labels.flatten()


def distillation_loss(
    student_TD: Float[Tensor, "T D"],
    teacher_TD: Float[Tensor, "T D"] | None,
    head_VD: Float[Tensor, "V D"],
    labels_T: Int[Tensor, " T"],
    *,
    kl_weight: float,
    ce_weight: float,
    teacher_head_VD: Float[Tensor, "V D"] | None = None,
) -> DistillationLoss:
    """w_kl * KL(dense || MoE) + w_ce * CE(labels) from the hidden states below the head.

    The first two terms of eq:total_loss. KL is averaged over all T positions, cross-entropy over
    those with a label. Softmax runs in float32.

    Args:
        student_TD: Final hidden states of the masked model.
        teacher_TD: The same of the dense model; no gradient. None: there is no KL term.
        head_VD: Output projection.
        labels_T: Next tokens, `IGNORED` where there is none.
        kl_weight: w_kl, >= 0. Paper: 2.
        ce_weight: w_ce, >= 0. Paper: 1.
        teacher_head_VD: Output projection of the dense model; None: the same.

    Gradient:
        To `student_TD`, and to `head_VD` if it wants one; formed chunk by chunk during the forward
        pass, so memory is one chunk of logits for each model (`MAX_CHUNK_ELEMENTS`) plus one
        gradient of the size of each of the two.
    """
    if teacher_head_VD is None:
        teacher_head_VD = head_VD.detach()
    total, kl, ce = _Distillation.apply(  # type: ignore[no-untyped-call]
        student_TD, teacher_TD, head_VD, teacher_head_VD, labels_T, kl_weight, ce_weight
    )
    return DistillationLoss(total, kl, ce)


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student_TD: Tensor,
        teacher_TD: Tensor | None,
        head_VD: Tensor,
        teacher_head_VD: Tensor,
        labels_T: Tensor,
        kl_weight: float,
        ce_weight: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_tokens = len(student_TD)
        num_labels = (labels_T != IGNORED).sum().clamp_min(1)
        kl = torch.zeros((), device=student_TD.device)
        ce = torch.zeros((), device=student_TD.device)
        grad_TD = torch.empty_like(student_TD)
        grad_VD = torch.zeros_like(head_VD) if ctx.needs_input_grad[2] else None
        kl_share, ce_share = kl_weight / num_tokens, ce_weight / num_labels
        rows = chunk_rows(len(head_VD), on_cpu=head_VD.device.type == "cpu")
        for start in range(0, num_tokens, rows):
            chunk = slice(start, start + rows)
            student_CD, labels_C = student_TD[chunk], labels_T[chunk]
            if teacher_TD is None:
                ce_sum, grad_CV = _cross_entropy(student_CD, head_VD, labels_C, ce_share)
            else:
                kl_sum, ce_sum, grad_CV = _chunk(
                    _log_softmax(student_CD, head_VD),
                    _log_softmax(teacher_TD[chunk], teacher_head_VD),
                    labels_C,
                    kl_share,
                    ce_share,
                )
                kl += kl_sum
            ce += ce_sum
            grad_CV = grad_CV.to(head_VD.dtype)
            grad_TD[chunk] = grad_CV @ head_VD
            if grad_VD is not None:
                grad_VD += grad_CV.T @ student_CD
            del grad_CV  # or it would still be there beside the next chunk's logits
        kl = kl / num_tokens
        ce = ce / num_labels
        ctx.save_for_backward(grad_TD, grad_VD)
        ctx.mark_non_differentiable(kl, ce)
        return kl_weight * kl + ce_weight * ce, kl, ce

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_TD, grad_VD = (
            None if grad is None else grad * grad_total.to(grad.dtype) for grad in ctx.saved_tensors
        )
        return grad_TD, None, grad_VD, None, None, None, None


def chunk_rows(vocabulary: int, *, on_cpu: bool) -> int:
    """Tokens whose logits are formed at once, at most."""
    rows = max(1, MAX_CHUNK_ELEMENTS // vocabulary)
    return min(rows, CPU_CHUNK_ROWS) if on_cpu else rows


def _log_softmax(hidden_CD: Tensor, head_VD: Tensor) -> Tensor:
    return F.log_softmax((hidden_CD @ head_VD.T).float(), dim=1)


def _chunk(
    student_CV: Tensor, teacher_log_CV: Tensor, labels_C: Tensor, kl_share: float, ce_share: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of KL and cross-entropy over some tokens, and kl_share, ce_share times their gradient.

    Both log-probabilities are overwritten: three tensors of tokens x vocabulary are alive at most,
    besides 16-bit logits.
    """
    teacher = teacher_log_CV.exp()
    kl_sum = teacher_log_CV.sub_(student_CV).mul_(teacher).sum()
    ce_sum = F.nll_loss(student_CV, labels_C, ignore_index=IGNORED, reduction="sum")
    student_CV.exp_()
    labelled = ((labels_C != IGNORED).unsqueeze(1) * ce_share).to(student_CV.dtype)
    grad = torch.sub(student_CV, teacher, out=teacher).mul_(kl_share)
    grad.addcmul_(student_CV, labelled)
    grad.scatter_add_(1, labels_C.clamp_min(0).unsqueeze(1), -labelled)
    return kl_sum, ce_sum, grad


def _cross_entropy(
    student_CD: Tensor, head_VD: Tensor, labels_C: Tensor, ce_share: Tensor
) -> tuple[Tensor, Tensor]:
    """Sum of cross-entropy over some tokens, and ce_share times its gradient."""
    student = _log_softmax(student_CD, head_VD)
    ce_sum = F.nll_loss(student, labels_C, ignore_index=IGNORED, reduction="sum")
    labelled = ((labels_C != IGNORED).unsqueeze(1) * ce_share).to(student.dtype)
    grad = student.exp_().mul_(labelled)
    grad.scatter_add_(1, labels_C.clamp_min(0).unsqueeze(1), -labelled)
    return ce_sum, grad
