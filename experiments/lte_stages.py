"""LTE as published: both stages train the dense weights, with as many tokens as DOT-MoE's two.

    python experiments/lte_stages.py RUN OUT

RUN is a conversion by `--method lte`, whose experts and text are used. Stage 1 trains weights and
routers together, with all experts weighted by their gates; stage 2 fixes the routers, runs only the
experts above the threshold, and trains the weights. DOT-MoE's alignment and finetuning take as many
steps, of as many tokens, on the same text. Writes OUT/lte.json: perplexity under the threshold
after each stage, and the active share with its spread.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

from dotmoe.cli.arguments import settings as settings_of
from dotmoe.common.files import write_json
from dotmoe.common.options import ARGUMENT
from dotmoe.measure.evaluate.perplexity import heldout_perplexity
from dotmoe.method.calibrate import block_inputs, unit_logits
from dotmoe.method.extract import Extracted
from dotmoe.models.config import LoadConfig
from dotmoe.models.dense_model import DenseModel
from dotmoe.models.load import load_described
from dotmoe.rivals.baselines import active_share, routed_by_own
from dotmoe.rivals.baselines.contract import next_token_loss
from dotmoe.rivals.baselines.lte import soft_stage, stepped
from dotmoe.run.finished import FinishedRun
from dotmoe.run.provenance import provenance


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """One conversion, and the length of each stage."""

    run: Annotated[Path, ARGUMENT]
    """Run folder of a finished conversion by LTE's partition."""
    out: Annotated[Path, ARGUMENT]
    """Folder to write."""
    soft_steps: int = 300
    """Steps of stage 1, as many as of the alignment."""
    hard_steps: int = 150
    """Steps of stage 2, as many as of the finetuning."""
    batch_size: int = 4
    lr: float = 1e-3
    """Peak learning rate of the weights, with cosine decay in each stage."""
    lr_router: float = 3e-3
    seed: int = 0


def annealed(groups: list[dict[str, Any]], steps: int) -> tuple[AdamW, CosineAnnealingLR]:
    """AdamW, and the cosine decay over these steps of its learning rates, the groups' at first."""
    # AdamW writes its learning rates into the dicts it is given: copies, or stage 2 starts at zero.
    optimizer = AdamW([dict(group) for group in groups], weight_decay=1e-4)
    return optimizer, CosineAnnealingLR(optimizer, steps)


def measured(dense: DenseModel, found: FinishedRun, routers: list[Tensor]) -> dict[str, Any]:
    """Perplexity under the threshold, and the share of neurons that run."""
    shares: list[Tensor] = []
    made = Extracted(layout=found.layouts[0], own_router={"router": torch.stack(routers).detach()})
    with torch.no_grad(), routed_by_own("lte", dense, made, shares):
        heldout = {found.text.heldout_name: found.text.heldout}
        result = heldout_perplexity(dense.model, dense.tokenizer, heldout)
    return result | {"active": active_share(shares, len(routers))}


def main() -> None:
    settings = settings_of(Settings, __doc__)
    found = FinishedRun(settings.run)
    dense, layout = load_described(found.described(), LoadConfig(dtype="float32")), found.layouts[0]
    training = found.text.training
    experts = {i: layout.expert_of_neuron_LN[i] for i in layout.moe_layers}
    generator = torch.Generator().manual_seed(settings.seed)
    routers = [
        unit_logits(torch.randn(layout.num_experts, x_TD.shape[1], generator=generator), x_TD)
        for x_TD, _ in block_inputs(dense, training.drawn(8_192))
    ]

    def batches(first: int, steps: int) -> Iterator[Tensor]:
        for step in range(first, first + steps):
            yield training.batch(step, settings.batch_size, settings.seed, 0, 1)

    trained = [
        {"params": [p.requires_grad_() for p in dense.model.parameters()], "lr": settings.lr},
        {"params": [r.requires_grad_() for r in routers], "lr": settings.lr_router},
    ]
    share = layout.active_experts / layout.num_experts
    stage, decay = annealed(trained, settings.soft_steps)
    soft = batches(0, settings.soft_steps)
    for step, figures in enumerate(soft_stage(dense, soft, experts, routers, share, stage)):
        decay.step()
        if step % 30 == 0:
            print(f"soft {step}: {figures}", flush=True)
    results = {"soft": measured(dense, found, routers)}
    print(results["soft"]["loss"], results["soft"]["active"], flush=True)
    made = Extracted(layout=layout, own_router={"router": torch.stack(routers).detach()})
    stage, decay = annealed(trained[:1], settings.hard_steps)
    for step, tokens_BT in enumerate(batches(settings.soft_steps, settings.hard_steps)):
        with routed_by_own("lte", dense, made):
            loss = next_token_loss(dense, tokens_BT)
            torch.autograd.backward(loss)
        stepped(stage)
        decay.step()
        if step % 30 == 0:
            print(f"hard {step}: {loss.item():.3f}", flush=True)
    results["hard"] = measured(dense, found, routers)
    print(results["hard"]["loss"], results["hard"]["active"], flush=True)
    steps = settings.soft_steps + settings.hard_steps
    record = {
        "origin": "measured",
        **results,
        "trained_tokens": steps * settings.batch_size * training.seq_len,
        "settings": {name: str(value) for name, value in asdict(settings).items()},
        "provenance": provenance(seed=settings.seed),
    }
    settings.out.mkdir(parents=True, exist_ok=True)
    write_json(settings.out / "lte.json", record)


if __name__ == "__main__":
    main()
