"""What is promised in float32 is, whatever a user or a library has set. Oracle: torch's flags."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from another_cpu import OtherCpu
from dotmoe.common.precision import in_fast_products, product_in_float32
from dotmoe.method.calibrate import block_inputs
from dotmoe.method.config import RepairConfig
from dotmoe.method.repair import repair
from dotmoe.method.repair.refit import NormalEquations, NormalEquationsByExpert
from dotmoe.method.router import router_logits
from dotmoe.method.transport import balanced_plan
from dotmoe.text.blocks import TokenBlocks

PRODUCTS = {"aten::mm", "aten::bmm", "aten::addmm", "aten::addmm_", "aten::mv"}


def flags():
    """What torch says of float32 products, None where it refuses to say."""
    found = [torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision]
    try:
        return [*found, torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu")]
    except RuntimeError:
        return [*found, None, torch.is_autocast_enabled("cpu")]


class Watch(TorchDispatchMode):
    """Remembers the flags at each product of float32."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_float32 = any(isinstance(a, torch.Tensor) and a.dtype == torch.float32 for a in args)
        if func._schema.name in PRODUCTS and is_float32:
            self.seen.append(flags())
        return func(*args, **kwargs or {})


@pytest.fixture(params=["nothing", "tf32", "medium", "backend", "everything", "autocast"])
def lowered(request):
    """Float32 products lowered as users and libraries do it; the flags then."""
    how, plain = request.param, flags()
    if how == "tf32":
        torch.backends.cuda.matmul.allow_tf32 = True
    if how == "medium":
        torch.set_float32_matmul_precision("medium")
    if how == "backend":
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    if how == "everything":
        torch.backends.fp32_precision = "tf32"
    with torch.autocast("cpu", enabled=how == "autocast"):
        yield flags()
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    assert flags()[2:] == plain[2:]


def logits():
    x, router = torch.randn(2, 64, 64, requires_grad=True)
    router_logits(x, router).sum().backward()


def solver():
    affinity = torch.randn(60, 12, requires_grad=True)
    balanced_plan(affinity, capacity=5, tau=0.1).entries[0, 0].backward()


def gram():
    hidden, missing = torch.randn(2, 30, 8)
    for kind in (NormalEquations, NormalEquationsByExpert):
        kind(torch.zeros(8, dtype=torch.long), 8).add(hidden, missing, torch.ones(30))


def head():
    product_in_float32(torch.ones(2, 2), torch.ones(2, 2))


@pytest.mark.parametrize("compute", [logits, solver, gram, head])
def test_products_are_float32_and_the_users_setting_stays(compute, lowered):
    with Watch() as watch:
        compute()
    assert watch.seen
    for cuda, mkldnn, legacy, is_autocast in watch.seen:
        assert {cuda, mkldnn} <= {"none", "ieee"}
        assert (legacy, is_autocast) == ("highest", False)
    assert flags() == lowered


def test_energies_of_heads(dense, tokens_BT, lowered):
    for _, energy in block_inputs(dense, tokens_BT, "attention"):
        with Watch() as watch:
            energy()
        assert watch.seen
        assert all(seen[2:] == ["highest", False] for seen in watch.seen)


def test_fast_products_are_those_of_the_context_alone(lowered):
    with in_fast_products(), Watch() as watch:
        assert flags()[:2] == ["tf32", "bf16"]
        gram()
    assert {tuple(each[:2]) for each in watch.seen} == {("ieee", "ieee")}
    assert flags()[:2] == lowered[:2]  # torch may tell the name that fits these now


def test_the_simulated_cpu_adds_in_another_order_and_rounds_where_it_may():
    """Oracle: float64. Sums of 96 products in float32 err by a random walk of roundings."""
    cpu, right = OtherCpu(1), torch.randn(96, 64)
    lefts = [torch.randn(rows, 96) for rows in range(1, 41)]

    def products():
        return [left @ right for left in lefts]

    plain = products()
    with cpu:
        others = products()
    assert not all(map(torch.equal, plain, others))
    for left, other in zip(lefts, others, strict=True):
        exact = left.double() @ right.double()
        assert float((other - exact).norm() / exact.norm()) < 96**0.5 * 2**-24
    kept = {torch.equal(left, cpu.rounded(left, right)[0]) for left in lefts}
    assert kept == {True}
    with in_fast_products():
        kept = {torch.equal(left, cpu.rounded(left, right)[0]) for left in lefts}
    assert kept == {True, False}, "some shapes are rounded, some are not"


@pytest.mark.parametrize("epochs", [0, 1])
def test_of_a_repair_only_the_products_of_the_training_are_fast(
    epochs, dense, layout_of, tokens_BT, tmp_path, lowered
):
    """With no epochs all are float32: streams, what a layer lacks, and the refit."""
    config = RepairConfig(repair_tokens=192, repair_epochs=epochs)
    layout = layout_of(dense, 6, active_experts=2, shared_size=24)
    blocks = TokenBlocks(tokens_BT.int())
    with Watch() as watch:
        repair(dense, (layout,), blocks, config, seed=0, folder=tmp_path)
    exact, fast = ("ieee", "ieee"), ("tf32", "bf16")
    expected = {exact, fast} if epochs else {exact}
    assert {tuple(each[:2]) for each in watch.seen} == expected
    assert flags()[:2] == lowered[:2]
