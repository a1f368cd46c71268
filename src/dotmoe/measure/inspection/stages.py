"""What each stage of a conversion costs, and the choices of a repair beside each other.

The time of a stage is that of its matrix products, by dtype, of the bytes that its other operations
move, and of what it reads from disk and tokenises. Alignment, repair and finetuning use all GPUs,
the other stages one. Passes and shares are those of `planner`; what is fitted or assumed is in
`UNMEASURED`.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from dotmoe.measure.config import InspectConfig
from dotmoe.measure.inspection.planner import (
    ADAM_BYTES,
    ASSIGNMENT_BYTES,
    USABLE_SHARE,
    Accelerator,
)
from dotmoe.measure.inspection.sizes import (
    FLOAT32,
    STREAMS,
    Items,
    Sizes,
    Step,
    calibration_memory,
    evaluation_memory,
    export_memory,
    exported_bytes,
    gathered,
    repair_memory,
)
from dotmoe.method.calibrate import OUTLIER_TOKENS, ROUNDS
from dotmoe.method.config import RepairConfig
from dotmoe.method.repair import BATCH, HELD_OUT, SOLUTIONS, repair_tokens
from dotmoe.method.sparse import whole_is_faster
from dotmoe.models.load import LARGEST_SHARE
from dotmoe.run.config import RunConfig, finetune_recipe
from dotmoe.text.tokenise import tokens_to_read

TOKENS_PER_S = 200_000
"""Tokens that one CPU thread tokenises in a second, measured with SmolLM2's tokenizer."""
DISK_BYTES_PER_S = 10**9
"""Bytes that a disk reads or writes in a second, assumed."""
SOLVER_STEPS = 40
"""Newton steps of a transport problem in the start from data, fitted."""
ENERGY_PASSES, INPUT_PASSES = 90, 45
"""Passes over a layer's energies, [T, N] in float32, and its inputs, [T, D] in float64, of all
rounds of the start, fitted: a product with as few columns as experts is bound by memory."""
CHOICES = {
    "": RepairConfig(),
    "--repair-epochs 0": RepairConfig(repair_epochs=0),
    "--repair-epochs 0 --repair-tokens 16384": RepairConfig(repair_epochs=0, repair_tokens=16_384),
}
"""Repairs to choose from, by their options; the first loses least and takes longest."""
UNMEASURED = (
    "Rates of GPUs are quoted from vendors, and the shares of them that are reached, assumed.",
    "Disks are assumed to read and write 1 GB/s; downloads are not included.",
)
SPLIT_LEFT_OUT = "A split by another method is timed as a run of the dense model alone."


class Work(NamedTuple):
    """What a stage does on one device: FLOP of products by dtype, bytes moved, and on disk."""

    held: int = 0
    """FLOP in the dtype of the weights in memory."""
    single: int = 0
    double: int = 0
    moved: int = 0
    """Bytes that all but products read and write in memory."""
    disk: int = 0
    tokens: int = 0
    """Number of tokens that are tokenised."""
    exchanged: int = 0
    """Bytes that each of several devices gives to the others."""

    def hours(self, machine: Accelerator) -> float:
        """Hours on one device of this machine."""
        share = machine.efficiency
        products = (
            self.held / machine.flops_per_s
            + self.single / (machine.single_flops_per_s or machine.flops_per_s)
            + self.double / (machine.double_flops_per_s or machine.flops_per_s)
        )
        moved = self.moved / (share.moved * machine.bytes_per_s)
        rest = self.disk / DISK_BYTES_PER_S + self.tokens / TOKENS_PER_S
        rest += self.exchanged / machine.link
        return (products / share.products + moved + rest) / 3_600


class Stages:
    """The stages of a conversion whose config has its defaults; 0 tokens: no stage."""

    def __init__(self, sizes: Sizes, config: RunConfig) -> None:
        self.sizes, self.config = sizes, config
        self.seq_len = min(config.data.seq_len, sizes.widths.context)
        self.calibration_tokens = config.calibration_tokens(sizes.widths.model)
        self.repair_tokens = 0
        if config.repair:
            self.repair_tokens = repair_tokens(config.repairing, sizes.splits, sizes.config)
        self.compares_layers = config.experts.first_dense_layers is None
        """Whether the number of leading dense layers is measured."""
        self.text_tokens = tokens_to_read(
            max(1, config.align.steps * config.align.batch_size) * self.seq_len,
            max(self.calibration_tokens, self.repair_tokens),
        )
        """Tokens of training text that are read, if there are so many."""

    def repaired(self) -> Iterator[tuple[str, "Stages"]]:
        """Options, and the same conversion with each of the `CHOICES` of fewer tokens."""
        most = repair_tokens(RepairConfig(), self.sizes.splits, self.sizes.config)
        for name, how in CHOICES.items():
            other = Stages(self.sizes, replace(self.config, repairing=how))
            if how.repair_tokens is None or other.repair_tokens < most:
                yield name, other

    def trainings(self) -> dict[str, tuple[Step, int]]:
        """A step of the alignment and of the finetuning, if any, and the tokens of all steps."""
        trainings, config, align = {}, self.config, self.config.align
        if align.steps:
            step = Step(sizes=self.sizes, batch_size=align.batch_size, seq_len=self.seq_len)
            trainings["align"] = step, align.steps * step.tokens
        if isinstance(config, InspectConfig) and not self.sizes.has_heads:
            tuning = finetune_recipe(config.finetune_recipe or "default")
            step = Step(
                sizes=self.sizes,
                batch_size=tuning.finetune.batch_size,
                seq_len=min(tuning.data.seq_len, self.sizes.widths.context),
                train=config.train or tuning.finetune.train,
                distils=tuning.finetune.kl_weight > 0,
            )
            steps = config.finetune_steps or tuning.finetune.steps
            trainings["finetune"] = step, steps * step.tokens
        return trainings

    def on(self, machine: Accelerator, align: dict[str, Any] | None) -> dict[str, Any]:
        """Hours, memory and disk of each stage on a machine; `align` is the plan of an alignment.

        `fits` is whether the device has the memory.
        """
        rows = list[dict[str, Any]]()
        for name, work, whole, written in self._all(machine):
            items = self._as_placed(whole, name, machine)
            on_host = 0 if machine.on_cpu else items.get(STREAMS, 0)
            row: dict[str, Any] = {"stage": name, "hours": work.hours(machine), "memory": items}
            rows.append(row | {"memory_total": sum(items.values()) - on_host, "disk": written})
        if align is not None:
            way = align["recommended"] or align["choices"][-1]
            trainables = self.sizes.affinities + self.sizes.counts.routers
            row = {"stage": "alignment", "hours": align["hours"], "disk": 6 * FLOAT32 * trainables}
            row |= {"memory": way["memory"], "memory_total": way["memory_total"]}
            start = [row["stage"] for row in rows].index("extraction")
            rows.insert(start, row)
        for row in rows:
            row["fits"] = row["memory_total"] <= USABLE_SHARE * machine.memory_bytes
        hours = [row["hours"] for row in rows]
        return {
            **machine.place,
            "stages": rows,
            "hours": None if None in hours else sum(hours),
            "fits": all(row["fits"] for row in rows),
        }

    def _as_placed(self, items: Items, stage: str, machine: Accelerator) -> Items:
        """The memory of a stage, with dense weights where `--sharding auto` puts them.

        What ranks divide for the start from data, rank zero reads from disk in its own stages.
        """
        weights, ranks = machine.held * self.sizes.counts.dense_total, machine.gpus
        is_whole = ranks == 1 or machine.on_cpu or weights <= LARGEST_SHARE * machine.memory_bytes
        if is_whole or "dense weights" not in items:
            return items
        held = machine.held * gathered(self.sizes)
        if stage == "start from data":
            held += -(-weights // ranks)
        return {**items, "dense weights": held}

    def forward(self, machine: Accelerator, tokens: int) -> Work:
        """A forward pass of the decoder layers of the dense model."""
        counts, share, widths = self.sizes.counts, machine.efficiency, self.sizes.widths
        passes = share.width * widths.model + share.neurons * widths.ffn
        scores = 4 * self.seq_len * self.sizes.queries * widths.layers
        return Work(
            held=(2 * (counts.attention_and_norms + counts.ffn_total) + scores) * tokens,
            moved=machine.held * widths.layers * passes * tokens,
        )

    def compare_layers(self, machine: Accelerator) -> Work:
        """The stream of a few tokens, with each FFN once more, and its output with neurons off."""
        again = 4 * 2 * self.sizes.counts.ffn_total // 3 * OUTLIER_TOKENS
        stream = self.forward(machine, OUTLIER_TOKENS)
        return stream._replace(held=stream.held + again)

    def calibrate(self, machine: Accelerator) -> Work:
        """The start from data: one stream; energies, ridge routers and transport of each layer.

        Of another method the stream alone.
        """
        split, widths = self.sizes.split, self.sizes.widths
        tokens, width, experts = self.calibration_tokens, widths.model, split.num_experts
        stream = self.forward(machine, tokens)
        if self.config.method != "dot_moe":
            return stream
        units, layers, routers = split.units, widths.layers, ROUNDS + 1
        a_router = (4 * tokens + 2 * width) * width * experts
        single = ROUNDS * 2 * tokens * experts * (width + units)
        double = 2 * tokens * width**2 + width**3 // 3 + routers * a_router
        solver = ROUNDS * SOLVER_STEPS * ASSIGNMENT_BYTES * units * split.columns
        passes = ENERGY_PASSES * FLOAT32 * units + INPUT_PASSES * 8 * width
        return stream._replace(
            held=stream.held + 4 * layers * units * width * tokens,
            single=layers * single,
            double=layers * double,
            moved=stream.moved + layers * (tokens * passes + solver),
        )

    def repair(self, machine: Accelerator) -> Work:
        """Repair on one of the ranks, which divide the tokens: the sum of its parts.

        | part | why |
        |---|---|
        | streams | dense and repaired, each through every layer; the FFNs' again if heads follow |
        | masked FFNs | the repaired stream runs the chosen experts |
        | refit | Gram matrices and solutions of output projections; for FFNs without training |
        | training | all projections of each FFN; ranks divide the neurons |
        """
        tokens = -(-self.repair_tokens // machine.gpus)
        passes = 3 if self.sizes.has_heads else 2
        streams = self.forward(machine, passes * tokens)
        parts = [streams, self._refit(machine, tokens)]
        if self.sizes.split.target == "ffn":
            parts += [self._masked_ffns(machine, tokens), self._ffn_training(machine, tokens)]
        return Work(*map(sum, zip(*parts, strict=True)))

    def _trained_tokens(self, tokens: int) -> int:
        """Tokens that the training of FFNs reads in all its epochs; 0: none is trained."""
        return self.config.repairing.repair_epochs * tokens * (HELD_OUT - 1) // HELD_OUT

    def _hidden_bytes(self, machine: Accelerator) -> int:
        """Bytes of all passes over the hidden neurons of a token, in float32."""
        return machine.efficiency.neurons * self.sizes.widths.ffn * self.sizes.moe_layers * FLOAT32

    def _masked_ffns(self, machine: Accelerator, tokens: int) -> Work:
        """The FFNs of the repaired stream by their experts, beside those that `forward` counts.

        If they are trained, one of the two streams runs no whole FFN: only a Gram matrix needs it.
        """
        whole = 2 * self.sizes.counts.ffn_total
        held, moved = int(whole * self.sizes.split.active_fraction) * tokens, 0
        if self._trained_tokens(tokens):
            held -= whole * tokens
            moved = -tokens * self._hidden_bytes(machine)
        return Work(held=held, moved=moved)

    def _refit(self, machine: Accelerator, tokens: int) -> Work:
        """Sums of one triangle over tokens, on a CPU of the experts that run; and solutions.

        Ranks exchange the sums.
        """
        sizes, width, ranks = self.sizes, self.sizes.widths.model, machine.gpus
        tried, grams, solutions, entries = SOLUTIONS - 1, 0, 0, 0
        for split, n in zip(sizes.splits, sizes.repaired_inputs, strict=True):
            if split.target != "attention" and self.config.repairing.repair_epochs:
                continue
            pairs, columns = n**2 // 2, n
            if machine.on_cpu:
                always = n * split.shared_size // split.units
                run = (n - always) * split.active_experts // split.num_experts
                pairs, columns = run * ((n - always) // 2 + always) + always**2, run + always
            grams += 2 * tokens * (pairs + columns * width)
            solutions += (tried + 1) * n**2 * (n // 3 + 2 * width) + tried * 2 * n**2 * width
            entries += 2 * n**2
        matrices = sizes.moe_layers * entries
        return Work(
            single=sizes.moe_layers * grams,
            double=sizes.moe_layers * solutions,
            exchanged=2 * (ranks - 1) * 2 * FLOAT32 * matrices // ranks,
        )

    def _ffn_training(self, machine: Accelerator, tokens: int) -> Work:
        """Training of all FFNs: 7/3 forwards of the experts that run, as inputs need no gradient.

        Ranks exchange inputs and outputs. A GPU with weights of 16 bits trains in TF32, at half the
        rate of bfloat16.
        """
        trained = self._trained_tokens(tokens)
        if not trained:
            return Work()
        sizes, split, ranks = self.sizes, self.sizes.split, machine.gpus
        device = torch.device("cpu" if machine.on_cpu else "cuda")
        active = split.active_experts / split.num_experts
        share = split.active_fraction
        if whole_is_faster(device, torch.float32, active, split.expert_size):
            share = 1.0
        run = int(sizes.counts.ffn_total * share)
        heldout = 2 * 2 * run * tokens // HELD_OUT
        products = 14 * run // 3 * trained + heldout
        updated = trained * sizes.counts.ffn_total // BATCH  # by all steps, on one rank
        moved = trained * 3 * self._hidden_bytes(machine) + ADAM_BYTES * updated
        given = (ranks - 1) * 3 * FLOAT32 * sizes.widths.model * sizes.moe_layers * trained
        if machine.held == 2 and not machine.on_cpu:
            return Work(held=2 * products, moved=moved, exchanged=given)
        return Work(single=products, moved=moved, exchanged=given)

    def export(self, machine: Accelerator) -> Work:
        """Writing and reading the export, and its verification in float32."""
        written = sum(exported_bytes(self.sizes).values())
        read = self.sizes.stored.itemsize * self.sizes.counts.dense_total
        verified = 4 * self.config.export.verify_tokens
        forwards = self.forward(machine, 2 * self.config.export.scale_tokens + verified)
        head = 2 * self.sizes.widths.model * self.sizes.widths.vocabulary * verified
        return Work(
            single=forwards.held + head, moved=2 * forwards.moved, disk=3 * written + 4 * read
        )

    def evaluate(self, machine: Accelerator) -> Work:
        """Perplexity of dense model and export and, before a repair, of the masked model."""
        models = 3 if self.repair_tokens else 2
        tokens, share = models * self.config.eval_tokens, machine.efficiency
        forwards, logits = self.forward(machine, tokens), self.sizes.widths.vocabulary * tokens
        return forwards._replace(
            held=forwards.held + 2 * self.sizes.widths.model * logits,
            moved=forwards.moved + share.vocabulary // 4 * machine.held * logits,
            disk=sum(exported_bytes(self.sizes).values()),
        )

    def _states(self) -> int:
        """How often affinities and routers are written before any alignment.

        1_calibrate holds them, and 2_align, even without steps; an alignment has a row of its own.
        A split by another method writes none, unless its router is trained.
        """
        if self.config.align.steps:
            return 1
        return 2 if self.config.method == "dot_moe" else 0

    def _all(self, machine: Accelerator) -> Iterator[tuple[str, Work, Items, int]]:
        """Name, work on one device, memory and bytes written of each stage but the alignment."""
        sizes, config, held = self.sizes, self.config, machine.held
        trainables = sizes.affinities + sizes.counts.routers
        read = self.text_tokens + config.eval_tokens
        yield "tokenise", Work(tokens=read), {}, FLOAT32 * read
        if self.compares_layers:
            memory = calibration_memory(sizes, OUTLIER_TOKENS, held)
            yield "dense layers", self.compare_layers(machine), memory, 0
        if self.calibration_tokens:
            memory = calibration_memory(sizes, self.calibration_tokens, held)
            is_ours = config.method == "dot_moe"
            name = "start from data" if is_ours else f"split by {config.method}"
            yield name, self.calibrate(machine), memory, FLOAT32 * trainables * self._states()
        units = sizes.widths.layers * sum(split.units for split in sizes.splits)
        yield "extraction", Work(), {}, FLOAT32 * (units + sizes.counts.routers)
        if self.repair_tokens:
            memory = repair_memory(sizes, -(-self.repair_tokens // machine.gpus), held)
            copies = 3 if config.repairing.repair_epochs else 1
            written = sizes.stored.itemsize * sizes.repaired * copies
            yield "repair", self.repair(machine), memory, written
        memory = export_memory(sizes, config.export.verify_tokens, held)
        yield "export", self.export(machine), memory, sum(exported_bytes(sizes).values())
        yield "evaluation", self.evaluate(machine), evaluation_memory(sizes, held), 0
