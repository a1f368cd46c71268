"""Make one linear map pruned by llm-compressor, an oracle of `tests/pruning`.

    python -m venv VENV
    VENV/bin/pip install torch==2.13.0 llmcompressor==0.14.0.1
    cd tests/pruning/fixtures
    VENV/bin/python ../../../scripts/llm_compressor_fixture.py llm_compressor.safetensors

Its requirements conflict with dotmoe's, so it has its own environment. The weight is [24, 160],
wider than one of SparseGPT's blocks of columns; the inputs [6, 64, 160] have one feature of zeros.
"""

import sys

import torch
from llmcompressor.modifiers.pruning.sparsegpt import sgpt_sparsify
from llmcompressor.modifiers.pruning.wanda import wanda_sparsify
from safetensors.torch import save_file

generator = torch.Generator().manual_seed(11)
mixing = torch.randn(40, 160, generator=generator)
x_BTI = torch.randn(6, 64, 40, generator=generator) @ mixing / 40**0.5
x_BTI += 0.3 * torch.randn(6, 64, 160, generator=generator)
x_BTI[..., 7] = 0
x_BTI = x_BTI.bfloat16().float()  # a small file
linear = torch.nn.Linear(160, 24, bias=False)
linear.weight.data = torch.randn(24, 160, generator=generator).bfloat16().float()

square_I, hessian_II = torch.zeros(160), torch.zeros(160, 160)
done_wanda = done_sparsegpt = 0
for x_TI in x_BTI:
    square_I, done_wanda = wanda_sparsify.accumulate_row_scalars(x_TI, linear, square_I, done_wanda)
    hessian_II, done_sparsegpt = sgpt_sparsify.accumulate_hessian(
        x_TI, linear, hessian_II, done_sparsegpt
    )
wanda = wanda_sparsify.sparsify_weight(linear, {linear: square_I}, 0.5, 2, 4)
sparsegpt = sgpt_sparsify.sparsify_weight(linear, {linear: hessian_II}, 0.5, 2, 4, 128, 0.01, False)
if isinstance(sparsegpt, tuple):  # the loss comes first
    sparsegpt = sparsegpt[-1]
made = {
    "x_BTI": x_BTI.bfloat16(),
    "weight_OI": linear.weight.data.bfloat16(),
    "wanda_OI": wanda.float(),
    "sparsegpt_OI": sparsegpt.float(),
}
save_file({name: tensor.contiguous() for name, tensor in made.items()}, sys.argv[1])
