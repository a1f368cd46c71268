"""Losses: pure functions of hidden states, logits and mask."""

from typing import Any

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

Losses = tuple[Float[Tensor, ""], Float[Tensor, ""], Float[Tensor, ""]]


def z_loss(logits_TE: Float[Tensor, "T E"]) -> Float[Tensor, ""]:
    """Mean over tokens of logsumexp(L)^2 (eq:z_loss); keeps router logits small."""
    return torch.logsumexp(logits_TE, dim=1).square().mean()


def balance_loss(
    logits_TE: Float[Tensor, "T E"], mask_TE: Float[Tensor, "T E"]
) -> Float[Tensor, ""]:
    """Load balancing E * sum_e f_e * p_e (eq:balance_loss).

    f_e is the share of tokens routed to expert e, a count without a gradient, p_e its mean softmax
    probability over all tokens and experts (over the chosen ones it would be a constant). From k,
    all experts used evenly, to E, the same k experts for every token.
    """
    share_E = mask_TE.detach().mean(dim=0)
    probability_E = torch.softmax(logits_TE, dim=1).mean(dim=0)
    return logits_TE.shape[1] * (share_E * probability_E).sum()


def next_token_labels(tokens_BT: Int[Tensor, "B T"]) -> Int[Tensor, " BT"]:
    """Labels of a batch, flat: the next token, and `IGNORED` at the end of each row."""
    return F.pad(tokens_BT[:, 1:], (0, 1), value=IGNORED).flatten()


def distillation_loss(
    student_TD: Float[Tensor, "T D"],
    teacher_TD: Float[Tensor, "T D"] | None,
    head_VD: Float[Tensor, "V D"],
    labels_T: Int[Tensor, " T"],
    *,
    kl_weight: float,
    ce_weight: float,
    teacher_head_VD: Float[Tensor, "V D"] | None = None,
) -> Losses:
    """w_kl * KL(dense || MoE) + w_ce * CE(labels) from the hidden states below the head.

    The first two terms of eq:total_loss. KL is averaged over all T positions, cross-entropy over
    those whose label is not `IGNORED`. Softmax runs in float32. Without a teacher there is no KL;
    without a head of its own it has the student's.

    Returns:
        The weighted sum, which alone has a gradient; KL; cross-entropy. In nats per token.

    Gradient:
        To `student_TD`, and to `head_VD` if it wants one; formed chunk by chunk during the forward
        pass, so memory is one chunk of logits for each model (`MAX_CHUNK_ELEMENTS`) plus one
        gradient of the size of each of the two. That of the head adds up in float32.
    """
    if teacher_head_VD is None:
        teacher_head_VD = head_VD.detach()
    losses: Losses = _Distillation.apply(  # type: ignore[no-untyped-call]
        student_TD, teacher_TD, head_VD, teacher_head_VD, labels_T, kl_weight, ce_weight
    )
    return losses


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
    ) -> Losses:
        num_tokens, num_labels = len(labels_T), (labels_T != IGNORED).sum().clamp_min(1)
        kl, ce = torch.zeros(2, device=student_TD.device)
        grad_TD = torch.empty_like(student_TD)
        wide = torch.promote_types(head_VD.dtype, torch.float32)
        grad_VD = torch.zeros_like(head_VD, dtype=wide) if ctx.needs_input_grad[2] else None
        shares = kl_weight / num_tokens, ce_weight / num_labels
        rows = chunk_rows(len(head_VD), on_cpu=head_VD.device.type == "cpu")
        for start in range(0, num_tokens, rows):
            chunk = slice(start, start + rows)
            teacher = None if teacher_TD is None else (teacher_TD[chunk], teacher_head_VD)
            kl_sum, ce_sum, grad_CV = _chunk(
                (student_TD[chunk], head_VD), teacher, labels_T[chunk], shares
            )
            kl += kl_sum
            ce += ce_sum
            grad_TD[chunk] = grad_CV @ head_VD
            if grad_VD is not None:
                if grad_VD.is_cuda:
                    grad_VD += product_in_float32(grad_CV.T, student_TD[chunk])
                else:  # makes and frees nothing of the head's size
                    grad_VD.addmm_(grad_CV.T.to(wide), student_TD[chunk].to(wide))
            del grad_CV  # or it would live beside the next chunk's
        kl, ce = kl / num_tokens, ce / num_labels
        ctx.save_for_backward(grad_TD, grad_VD)
        ctx.mark_non_differentiable(kl, ce)
        return kl_weight * kl + ce_weight * ce, kl, ce

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_TD, grad_VD = (
            None if grad is None else grad * grad_total.to(grad.dtype) for grad in ctx.saved_tensors
        )
        return grad_TD, None, grad_VD, None, None, None, None


def _chunk(
    student: tuple[Tensor, Tensor],
    teacher: tuple[Tensor, Tensor] | None,
    labels_C: Tensor,
    shares: tuple[float, Tensor],
) -> tuple[Tensor | float, Tensor, Tensor]:
    """Sums of KL and cross-entropy over some tokens, and the gradient of the logits.

    Three tensors of tokens x vocabulary are alive at most, besides 16-bit logits.
    """
    kl_sum: Tensor | float = 0.0
    student_CV = _log_softmax(*student)
    if teacher is not None:
        log_CV = _log_softmax(*teacher)
        teacher_CV = log_CV.exp()
        kl_sum = log_CV.sub_(student_CV).mul_(teacher_CV).sum()
        del log_CV
    ce_sum = F.nll_loss(student_CV, labels_C, ignore_index=IGNORED, reduction="sum")
    student_CV.exp_()
    labels_C1, (kl_share, ce_share) = labels_C.unsqueeze(1), shares
    labelled_C1 = ((labels_C1 != IGNORED) * ce_share).to(student_CV.dtype)
    if teacher is None:
        grad_CV = student_CV.mul_(labelled_C1)
    else:
        grad_CV = torch.sub(student_CV, teacher_CV, out=teacher_CV).mul_(kl_share)
        grad_CV.addcmul_(student_CV, labelled_C1)
    grad_CV.scatter_add_(1, labels_C1.clamp_min(0), -labelled_C1)
    return kl_sum, ce_sum, grad_CV.to(student[1].dtype)


def _log_softmax(hidden_CD: Tensor, head_VD: Tensor) -> Tensor:
    return F.log_softmax((hidden_CD @ head_VD.T).float(), dim=1)


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
