"""Launch the Triton kernels; where they cannot run, `run_on` says so and PyTorch does the work."""

import importlib.util

import torch
from jaxtyping import Float, Int
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_COLUMNS = 1_024
"""Neurons of one program."""


def run_on(tensor: Tensor) -> bool:
    """Whether the kernels can work on it: on CUDA, 16 or 32 bits wide, and Triton is installed."""
    return HAS_TRITON and tensor.is_cuda and tensor.dtype in _DTYPES


def masked_activation(
    gate_TN: Float[Tensor, "T N"],
    up_TN: Float[Tensor, "T N"],
    routing_TE: Float[Tensor, "T E"],
    expert_of_neuron_N: Int[Tensor, " N"],
) -> Float[Tensor, "T N"]:
    """SiLU(gate) * up * R[:, expert_of_neuron]; rounded where PyTorch's operations would round."""
    from dotmoe.moe import triton_kernels

    tensors = _contiguous(gate_TN, up_TN, routing_TE, expert_of_neuron_N)
    masked_TN = torch.empty_like(tensors[0])
    with torch.cuda.device(gate_TN.get_device()):
        triton_kernels.masked_activation[_grid(gate_TN)](
            *tensors, masked_TN, gate_TN.shape[1], routing_TE.shape[1], COLUMNS=_COLUMNS
        )
    return masked_TN


def masked_activation_gradient(
    grad_TN: Float[Tensor, "T N"],
    gate_TN: Float[Tensor, "T N"],
    up_TN: Float[Tensor, "T N"],
    routing_TE: Float[Tensor, "T E"],
    expert_of_neuron_N: Int[Tensor, " N"],
    *,
    wants_mask: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of gate, up and, if wanted, of the entries of the mask; rounded once."""
    from dotmoe.moe import triton_kernels

    tensors = _contiguous(grad_TN, gate_TN, up_TN, routing_TE, expert_of_neuron_N)
    grad_gate_TN, grad_up_TN = torch.empty_like(tensors[1]), torch.empty_like(tensors[1])
    grad_mask_TN = torch.empty_like(tensors[1]) if wants_mask else None
    with torch.cuda.device(gate_TN.get_device()):
        triton_kernels.masked_activation_gradient[_grid(gate_TN)](
            *tensors,
            grad_gate_TN,
            grad_up_TN,
            grad_up_TN if grad_mask_TN is None else grad_mask_TN,
            gate_TN.shape[1],
            routing_TE.shape[1],
            WANTS_MASK=wants_mask,
            COLUMNS=_COLUMNS,
        )
    return grad_gate_TN, grad_up_TN, grad_mask_TN


def soft_top_k(
    scaled_TE: Float[Tensor, "T E"],
    low_T1: Float[Tensor, "T 1"],
    high_T1: Float[Tensor, "T 1"],
    active_experts: int,
    *,
    iterations: int,
) -> Float[Tensor, "T E"]:
    """sigmoid(x - theta_t) with rows that sum to k; theta_t by Newton steps inside its bracket.

    Args:
        scaled_TE: Logits over temperature, float32.
        low_T1: Lower end of each row's bracket.
        high_T1: Upper end.
        active_experts: k, below E.
        iterations: Newton or bisection steps.
    """
    from dotmoe.moe import triton_kernels

    tensors = _contiguous(scaled_TE, low_T1, high_T1)
    soft_TE = torch.empty_like(tensors[0])
    num_tokens, num_experts = scaled_TE.shape
    with torch.cuda.device(scaled_TE.get_device()):
        triton_kernels.soft_top_k[(num_tokens,)](
            *tensors,
            soft_TE,
            num_experts,
            float(active_experts),
            torch.finfo(scaled_TE.dtype).tiny,
            ITERATIONS=iterations,
            EXPERTS=1 << (num_experts - 1).bit_length(),
        )
    return soft_TE


def _grid(values_TN: Tensor) -> tuple[int, int]:
    return len(values_TN), -(-values_TN.shape[1] // _COLUMNS)


def _contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.contiguous() for tensor in tensors)
