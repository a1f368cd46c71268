"""Triton kernels against PyTorch's operations: on the CPU by Triton's interpreter, and on CUDA."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from test_masked_activation import each, gradients, in_float64, inputs

from dotmoe.method import masked, router, triton_kernels
from dotmoe.method.masked import masked_activation
from dotmoe.method.router import kernels_for, soft_top_k

HAS_CUDA = torch.cuda.is_available()


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """Where the kernels run in this test; on the CPU they are made to run, by the interpreter."""
    if request.param == "cuda":
        return torch.device("cuda")
    if HAS_CUDA:
        pytest.skip("Triton compiles here, and does not interpret")

    def kernels(tensor):
        return None if tensor.dtype == torch.float64 else triton_kernels

    for module in (masked, router):
        monkeypatch.setattr(module, "kernels_for", kernels)
    return torch.device("cpu")


@each
@pytest.mark.parametrize("scale", [0.0, 1.0, 100.0])
@pytest.mark.parametrize("shape", [(1, 8, 2), (5, 1_030, 5), (3, 2_048, 16)])
def test_the_masked_activation_is_that_of_float64(device, shape, scale, activation):
    tensors = inputs(torch.float32, shape, scale=scale, device=device)
    found = gradients(masked_activation, *tensors, activation)
    expected = gradients(masked_activation, *in_float64(tensors), activation)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one.double(), other, rtol=1e-4, atol=1e-5 * max(1.0, scale) ** 3)


@each
def test_in_bfloat16_the_forward_rounds_as_the_dense_ffn_does(device, activation, monkeypatch):
    tensors = inputs(torch.bfloat16, (4, 1_100, 11), device=device)
    found = gradients(masked_activation, *tensors, activation)
    monkeypatch.setattr(masked, "kernels_for", lambda tensor: None)
    expected = gradients(masked_activation, *tensors, activation)
    if device.type == "cuda":  # the interpreter cuts bits off where hardware rounds
        same = (found[0] == expected[0]).float().mean()
        assert same > 0.999  # two exponentials may differ in a bit
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.allclose(one.float(), other.float(), rtol=0.02, atol=0.04)


@pytest.mark.parametrize(("experts", "active"), [(2, 1), (9, 4), (148, 37), (148, 147)])
def test_the_soft_top_k_is_that_of_float64(device, experts, active):
    generator = torch.Generator().manual_seed(0)
    spread_51 = torch.tensor([[0.0], [1e-3], [1.0], [30.0], [1e4]])
    logits = (spread_51 * torch.randn(5, experts, generator=generator)).to(device)
    soft, expected = soft_top_k(logits, active), soft_top_k(logits.double(), active)
    # A logit of 1e4 carries an error of 5e-4 in float32.
    assert ((soft - expected).abs().cpu() < 1e-5 + 1e-7 * spread_51).all()


def test_the_kernels_stay_away_from_the_cpu_and_from_float64():
    assert kernels_for(torch.zeros(1)) is None
    if HAS_CUDA:
        assert kernels_for(torch.zeros(1, device="cuda")) is triton_kernels
        assert kernels_for(torch.zeros(1, device="cuda", dtype=torch.float64)) is None
