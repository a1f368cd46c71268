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
    teacher_TD: Float[Tensor, "T D"],
    head_VD: Float[Tensor, "V D"],
    labels_T: Int[Tensor, " T"],
    *,
    kl_weight: float,
    ce_weight: float,
) -> DistillationLoss:
    """w_kl * KL(dense || MoE) + w_ce * CE(labels) from hidden states below a frozen head.

    The first two terms of eq:total_loss. KL is averaged over all T positions, cross-entropy over
    those with a label. Softmax runs in float32.

    Args:
        student_TD: Final hidden states of the masked model.
        teacher_TD: The same of the dense model; no gradient.
        head_VD: Output projection shared by both; no gradient, it is frozen.
        labels_T: Next tokens, `IGNORED` where there is none.
        kl_weight: w_kl, >= 0. Paper: 2.
        ce_weight: w_ce, >= 0. Paper: 1.

    Gradient:
        To `student_TD` only, formed chunk by chunk during the forward pass, so memory is one chunk
        of logits for each model (`MAX_CHUNK_ELEMENTS`) plus one gradient of the size of the input.
    """
    total, kl, ce = _Distillation.apply(  # type: ignore[no-untyped-call]
        student_TD, teacher_TD, head_VD, labels_T, kl_weight, ce_weight
    )
    return DistillationLoss(total, kl, ce)


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student_TD: Tensor,
        teacher_TD: Tensor,
        head_VD: Tensor,
        labels_T: Tensor,
        kl_weight: float,
        ce_weight: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_tokens = len(student_TD)
        num_labels = (labels_T != IGNORED).sum().clamp_min(1)
        kl = torch.zeros((), device=student_TD.device)
        ce = torch.zeros((), device=student_TD.device)
        grad_TD = torch.empty_like(student_TD)
        kl_share, ce_share = kl_weight / num_tokens, ce_weight / num_labels
        rows = chunk_rows(len(head_VD), on_cpu=head_VD.device.type == "cpu")
        for start in range(0, num_tokens, rows):
            chunk = slice(start, start + rows)
            kl_sum, ce_sum, grad_TD[chunk] = _chunk(
                student_TD[chunk], teacher_TD[chunk], head_VD, labels_T[chunk], kl_share, ce_share
            )
            kl += kl_sum
            ce += ce_sum
        kl = kl / num_tokens
        ce = ce / num_labels
        ctx.save_for_backward(grad_TD)
        ctx.mark_non_differentiable(kl, ce)
        return kl_weight * kl + ce_weight * ce, kl, ce

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (grad_TD,) = ctx.saved_tensors
        return grad_TD * grad_total.to(grad_TD.dtype), None, None, None, None, None


def chunk_rows(vocabulary: int, *, on_cpu: bool) -> int:
    """Tokens whose logits are formed at once, at most."""
    rows = max(1, MAX_CHUNK_ELEMENTS // vocabulary)
    return min(rows, CPU_CHUNK_ROWS) if on_cpu else rows


def _chunk(
    student_CD: Tensor,
    teacher_CD: Tensor,
    head_VD: Tensor,
    labels_C: Tensor,
    kl_share: float,
    ce_share: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of KL and cross-entropy over some tokens, and kl_share, ce_share times their gradient.

    Three tensors of tokens x vocabulary are alive at most, besides 16-bit logits.
    """
    student = F.log_softmax((student_CD @ head_VD.T).float(), dim=1)
    teacher_log = F.log_softmax((teacher_CD @ head_VD.T).float(), dim=1)
    teacher = teacher_log.exp()
    kl_sum = teacher_log.sub_(student).mul_(teacher).sum()
    ce_sum = F.nll_loss(student, labels_C, ignore_index=IGNORED, reduction="sum")
    student.exp_()
    labelled = ((labels_C != IGNORED).unsqueeze(1) * ce_share).to(student.dtype)
    grad = torch.sub(student, teacher, out=teacher).mul_(kl_share)
    grad.addcmul_(student, labelled)
    grad.scatter_add_(1, labels_C.clamp_min(0).unsqueeze(1), -labelled)
    return kl_sum, ce_sum, grad.to(head_VD.dtype) @ head_VD
