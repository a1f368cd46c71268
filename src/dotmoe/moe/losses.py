"""Losses: pure functions of hidden states, logits and mask."""

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


def z_loss(logits_TE: Float[Tensor, "T E"]) -> Float[Tensor, ""]:
    """Mean over tokens of logsumexp(L)^2 (eq:z_loss); keeps router logits small.

    Gradient: through the logits.
    """
    return torch.logsumexp(logits_TE, dim=1).square().mean()


def balance_loss(
    logits_TE: Float[Tensor, "T E"], mask_TE: Float[Tensor, "T E"]
) -> Float[Tensor, ""]:
    """Load balancing E * sum_e f_e * p_e (eq:balance_loss).

    f_e is the share of tokens routed to expert e, p_e the mean softmax probability of e over all
    tokens and all experts (not renormalised over the chosen ones, which would make it a constant).

    Returns:
        k when all experts are used evenly; E when the same k experts run for every token.

    Gradient:
        Through p_e only; f_e is a count.
    """
    share_E = mask_TE.detach().mean(dim=0)
    probability_E = torch.softmax(logits_TE, dim=1).mean(dim=0)
    return logits_TE.shape[1] * (share_E * probability_E).sum()


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
        gradient of the size of each of the two. That of the head adds up in float32.
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
        wide = torch.promote_types(head_VD.dtype, torch.float32)
        grad_VD = torch.zeros_like(head_VD, dtype=wide) if ctx.needs_input_grad[2] else None
        kl_share, ce_share = kl_weight / num_tokens, ce_weight / num_labels
        rows = chunk_rows(len(head_VD), on_cpu=head_VD.device.type == "cpu")
        for start in range(0, num_tokens, rows):
            chunk = slice(start, start + rows)
            student_CV = _log_softmax(student_TD[chunk], head_VD)
            teacher_CV = None
            if teacher_TD is not None:
                teacher_CV = _log_softmax(teacher_TD[chunk], teacher_head_VD)
            kl_sum, ce_sum, grad_CV = _chunk(
                student_CV, teacher_CV, labels_T[chunk], kl_share, ce_share
            )
            kl += kl_sum
            ce += ce_sum
            grad_CV = grad_CV.to(head_VD.dtype)
            grad_TD[chunk] = grad_CV @ head_VD
            if grad_VD is not None:
                grad_VD += product_in_float32(grad_CV.T, student_TD[chunk])
            del student_CV, teacher_CV, grad_CV  # or they would live beside the next chunk's
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


def _log_softmax(hidden_CD: Tensor, head_VD: Tensor) -> Tensor:
    return F.log_softmax((hidden_CD @ head_VD.T).float(), dim=1)


def _chunk(
    student_CV: Tensor,
    teacher_CV: Tensor | None,
    labels_C: Tensor,
    kl_share: float,
    ce_share: Tensor,
) -> tuple[Tensor | float, Tensor, Tensor]:
    """Sums of KL and cross-entropy over some tokens, and kl_share, ce_share times their gradient.

    Both log-probabilities are overwritten: three tensors of tokens x vocabulary are alive at most,
    besides 16-bit logits.
    """
    kl_sum: Tensor | float = 0.0
    teacher = None if teacher_CV is None else teacher_CV.exp()
    if teacher_CV is not None and teacher is not None:
        kl_sum = teacher_CV.sub_(student_CV).mul_(teacher).sum()
    ce_sum = F.nll_loss(student_CV, labels_C, ignore_index=IGNORED, reduction="sum")
    student_CV.exp_()
    labelled = ((labels_C != IGNORED).unsqueeze(1) * ce_share).to(student_CV.dtype)
    if teacher is None:
        grad = student_CV.mul_(labelled)
    else:
        grad = torch.sub(student_CV, teacher, out=teacher).mul_(kl_share)
        grad.addcmul_(student_CV, labelled)
    grad.scatter_add_(1, labels_C.clamp_min(0).unsqueeze(1), -labelled)
    return kl_sum, ce_sum, grad


def chunk_rows(vocabulary: int, *, on_cpu: bool) -> int:
    """Tokens whose logits are formed at once, at most."""
    rows = max(1, MAX_CHUNK_ELEMENTS // vocabulary)
    return min(rows, CPU_CHUNK_ROWS) if on_cpu else rows


def product_in_float32(left: Tensor, right: Tensor) -> Tensor:
    """Matrix product; that of 16-bit factors is accumulated and returned in float32."""
    if left.dtype not in (torch.bfloat16, torch.float16):
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()
