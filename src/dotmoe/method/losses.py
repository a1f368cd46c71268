"""Losses from the hidden states below the output head, which form its logits chunk by chunk."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dotmoe.common.device import memory_of
from dotmoe.common.precision import product_in_float32
from dotmoe.common.sharded import full_tensor
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.traits import PLAIN, Readout

IGNORED = -100
"""Label of a position that has no next token."""
MAX_CHUNK_ELEMENTS = 1 << 25
"""Maximum number of logits in one chunk, per model, on a CPU or small GPU: 128 MiB in float32."""
CHUNKS_IN_MEMORY = 64
"""How many float32 tensors of one chunk a GPU could hold, unless that makes chunks smaller."""
CPU_CHUNK_ROWS = 128
"""Maximum number of tokens in one chunk on a CPU, so that its logits stay near the cache."""

Losses = tuple[Float[Tensor, ""], Float[Tensor, ""], Float[Tensor, ""]]
Taught = tuple[Tensor, Tensor | None]
"""A teacher's final hidden states, [T, D], and its head's matrix (None: the student's head)."""


def head_of(dense: DenseModel) -> Tensor:
    """The matrix of the output head, [V, D], whole on every rank."""
    dense.require("memory", "shards")
    return full_tensor(dense.model.get_parameter("lm_head.weight"))


def next_token_labels(tokens_BT: Int[Tensor, "B T"]) -> Int[Tensor, " BT"]:
    """Labels of a batch, flat: the next token, and `IGNORED` at the end of each row."""
    return F.pad(tokens_BT[:, 1:], (0, 1), value=IGNORED).flatten()


def distillation_loss(
    student_TD: Float[Tensor, "T D"],
    taught: Taught | None,
    head_VD: Float[Tensor, "V D"],
    labels_T: Int[Tensor, " T"],
    readout: Readout = PLAIN,
    *,
    kl_weight: float,
    ce_weight: float,
) -> Losses:
    """w_kl * KL(dense || MoE) + w_ce * CE(labels) from the hidden states below the head.

    These are the first two terms of eq:total_loss. KL is averaged over all T positions (and is 0
    without a teacher), cross-entropy over those whose label is not `IGNORED`. Softmax is float32.

    Returns:
        The weighted sum, which alone has a gradient; KL; cross-entropy. In nats per token.

    Gradient:
        Flows to `student_TD`, and to `head_VD` if it requires one. It is formed chunk by chunk in
        the forward pass, so memory is one chunk of logits per model (`chunk_rows`) plus the
        gradients of these two inputs. The head's gradient is accumulated in float32.
    """
    losses: Losses = _Distillation.apply(  # type: ignore[no-untyped-call]
        student_TD, head_VD, taught, labels_T, readout, kl_weight, ce_weight
    )
    return losses


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student_TD: Tensor,
        head_VD: Tensor,
        taught: Taught | None,
        labels_T: Tensor,
        readout: Readout,
        kl_weight: float,
        ce_weight: float,
    ) -> Losses:
        num_tokens, num_labels = len(labels_T), (labels_T != IGNORED).sum().clamp_min(1)
        kl, ce = torch.zeros(2, device=student_TD.device)
        grad_TD = torch.empty_like(student_TD)
        wide = torch.promote_types(head_VD.dtype, torch.float32)
        grad_VD = torch.zeros_like(head_VD, dtype=wide) if ctx.needs_input_grad[1] else None
        shares = kl_weight / num_tokens, ce_weight / num_labels
        teacher_TD, teacher_head_VD = taught or (None, None)
        if teacher_head_VD is None:
            teacher_head_VD = head_VD
        rows = _rows_at_once(head_VD)
        for start in range(0, num_tokens, rows):
            chunk = slice(start, start + rows)
            teacher = None if teacher_TD is None else (teacher_TD[chunk], teacher_head_VD)
            kl_sum, ce_sum, grad_CV = _chunk(
                (student_TD[chunk], head_VD), teacher, labels_T[chunk], shares, readout
            )
            kl += kl_sum
            ce += ce_sum
            grad_TD[chunk] = grad_CV @ head_VD
            if grad_VD is not None:
                if grad_VD.is_cuda:
                    grad_VD += product_in_float32(grad_CV.T, student_TD[chunk])
                else:  # allocates nothing of the head's size
                    grad_VD.addmm_(grad_CV.T.to(wide), student_TD[chunk].to(wide))
            del grad_CV  # otherwise it would stay in memory with the next chunk's
        kl, ce = kl / num_tokens, ce / num_labels
        ctx.save_for_backward(grad_TD, grad_VD)
        ctx.mark_non_differentiable(kl, ce)
        return kl_weight * kl + ce_weight * ce, kl, ce

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        # A tensor without dimensions would not widen 16 bits, in which 1/12 is off by 0.2 %.
        factor = grad_total.view(1)
        of_student, of_head = (
            None if grad is None else (grad * factor).to(grad.dtype) for grad in ctx.saved_tensors
        )
        return of_student, of_head, None, None, None, None, None


def _chunk(
    student: tuple[Tensor, Tensor],
    teacher: tuple[Tensor, Tensor] | None,
    labels_C: Tensor,
    shares: tuple[float, Tensor],
    readout: Readout,
) -> tuple[Tensor | float, Tensor, Tensor]:
    """Sums of KL and cross-entropy over some tokens, and the gradient of the head's product.

    `student` and `teacher` are hidden states and head. At most three (with a cap four) tensors of
    tokens x vocabulary exist, besides 16-bit logits: what is no longer read is overwritten, and the
    buffer then goes by the name of what it holds.
    """
    (student_CD, head_VD), (kl_share, ce_share) = student, shares
    logits_CV = readout.logits(student_CD @ head_VD.T)
    slope = readout.slope(logits_CV)
    student_log_CV = logits_CV.log_softmax(dim=1)
    del logits_CV
    ce_sum = F.nll_loss(student_log_CV, labels_C, ignore_index=IGNORED, reduction="sum")
    labels_C1 = labels_C.unsqueeze(1)
    ce_share_C1 = torch.where(labels_C1 == IGNORED, 0.0, ce_share).to(student_log_CV.dtype)
    if teacher is None:
        kl_sum: Tensor | float = 0.0
        student_CV = student_log_CV.exp_()
        grad_CV = student_CV.mul_(ce_share_C1)
    else:
        teacher_CV, kl_sum = _taught(teacher, student_log_CV, readout)
        student_CV = student_log_CV.exp_()
        grad_CV = torch.sub(student_CV, teacher_CV, out=teacher_CV).mul_(kl_share)
        grad_CV.addcmul_(student_CV, ce_share_C1)
    grad_CV.scatter_add_(1, labels_C1.clamp_min(0), -ce_share_C1)
    if readout != PLAIN:
        grad_CV *= slope
    return kl_sum, ce_sum, grad_CV.to(head_VD.dtype)


def _taught(
    teacher: tuple[Tensor, Tensor], student_log_CV: Tensor, readout: Readout
) -> tuple[Tensor, Tensor]:
    """The teacher's probabilities of some tokens, and the sum of KL(teacher || student)."""
    hidden_CD, head_VD = teacher
    teacher_log_CV = readout.logits(hidden_CD @ head_VD.T).log_softmax(dim=1)
    teacher_CV = teacher_log_CV.exp()
    difference_CV = teacher_log_CV.sub_(student_log_CV)
    return teacher_CV, difference_CV.mul_(teacher_CV).sum()


def _rows_at_once(head_VD: Tensor) -> int:
    """The number of tokens in a chunk on the head's device."""
    device = head_VD.device
    memory_bytes = memory_of(device) if device.type == "cuda" else 0
    return chunk_rows(len(head_VD), on_cpu=device.type == "cpu", memory_bytes=memory_bytes)


def chunk_rows(vocabulary: int, *, on_cpu: bool, memory_bytes: int = 0) -> int:
    """Maximum number of tokens whose logits are formed at once, given the memory of a GPU.

    There a float32 tensor of a chunk takes at most a 64th of it: each chunk reads the head, and if
    that is trained, adds to a gradient of the head's size.
    """
    if on_cpu:
        return min(CPU_CHUNK_ROWS, max(1, MAX_CHUNK_ELEMENTS // vocabulary))
    entries = memory_bytes // (CHUNKS_IN_MEMORY * torch.float32.itemsize)
    if entries > MAX_CHUNK_ELEMENTS:  # GPUs of nearly the same memory have the same chunks
        entries = 1 << (entries.bit_length() - 1)
    return max(1, max(entries, MAX_CHUNK_ELEMENTS) // vocabulary)
