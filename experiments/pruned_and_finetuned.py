"""Finetuning of a pruned model, whose zeros stay zero: what a user of pruning would do next.

    python experiments/pruned_and_finetuned.py COMPARED/sparsegpt_2_4 RUN OUT

All FFNs learn to predict like the dense model, on the text and by the settings of RUN, a
`dotmoe finetune` of the same model: the same batches in the same order. OUT receives `model/`, a
stock checkpoint, and `manifest.json`, for `scripts/real_model.py rows`. Stopped, it goes on with
the same command.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor
from tyro.conf import Positional

from dotmoe.common.distributed import fsdp_mesh
from dotmoe.common.files import read_json, write_json
from dotmoe.measure.evaluate.perplexity import difference, heldout_perplexity
from dotmoe.method.finetuning import Finetuning, Student, write_student
from dotmoe.method.layout import ExpertLayout
from dotmoe.models.config import LoadConfig
from dotmoe.models.family import meta_model
from dotmoe.models.load import MODEL, describe_dense, load_dense
from dotmoe.rivals.pruning import METRICS
from dotmoe.run.config import FinetuneRunConfig
from dotmoe.run.finished import FinishedRun
from dotmoe.run.folder import RunFolder, provenance
from dotmoe.training.loop import train

Folder = Annotated[Positional[Path], tyro.conf.arg(metavar="FOLDER")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """A method's folder in a comparison, a finetuning, and the folder to write."""

    pruned: Folder
    run: Folder
    out: Folder


def kept_by(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """A function that sets a gradient to zero where the weight is zero now; AdamW keeps it so."""
    kept = weight.detach() != 0
    return lambda grad: grad * kept


def main() -> None:
    settings = tyro.cli(Settings)
    settings.out.mkdir(parents=True, exist_ok=True)
    found, pruned = FinishedRun(settings.run), RunFolder(settings.pruned)
    assert isinstance(found.config, FinetuneRunConfig)
    how, seed, blocks = found.config.finetune, found.config.seed, found.text.training
    teacher = load_dense(found.origin().source, LoadConfig(dtype="float32"))
    dense = describe_dense(str(pruned.stage("prune") / MODEL))
    dense = replace(dense, model=meta_model(dense.config, torch.float32), weights="meta")
    neurons_LN = torch.zeros(dense.widths.layers, dense.config.intermediate_size, dtype=torch.long)
    router_LED = torch.zeros(dense.widths.layers, 1, dense.widths.model)
    whole = ExpertLayout(expert_of_neuron_LN=neurons_LN, router_LED=router_LED, active_experts=1)
    with fsdp_mesh(torch.device("cpu"), shard=False) as ranks:
        student = Student(dense, whole, how, ranks, seed=seed)  # one expert is the FFN
        for weight in student.trained().values():
            hooked: Any = weight
            hooked.register_hook(kept_by(weight))
        task = Finetuning(student, teacher, blocks, how, seed=seed)
        train(task, settings.out, on_step=lambda step, metrics: print(step, metrics, flush=True))
        write_student(student, whole, settings.out / MODEL)
    read = read_json(pruned.stage("prune") / METRICS)["calibration_tokens"]
    read += task.schedule.steps * how.batch_size * blocks.seq_len
    row = {"value": pruned.manifest["config"]["method"], "weights": "finetuned"}
    row |= {"run": settings.out.name, "text_tokens": read, "finetune": asdict(how)}
    dense = load_dense(str(settings.out / MODEL), LoadConfig(dtype="float32"))
    heldout = {found.text.heldout_name: found.text.heldout}
    result = heldout_perplexity(dense.model, dense.tokenizer, heldout)
    row |= {each: result[each] for each in ("perplexity", "loss", "window_losses")}
    before = read_json(settings.run / "6_evaluate" / "results.json")["dense"]
    row["loss_above_dense"] = difference(result, before)[0]
    stages = {"finetune": {"provenance": provenance(seed)}}
    write_json(settings.out / "manifest.json", {"row": row, "stages": stages})


if __name__ == "__main__":
    main()
