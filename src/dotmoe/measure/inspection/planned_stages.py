"""The stages of a conversion: hours, memory, disk and operations of each, and choices of a repair.

The operations themselves are the table in `operations`.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from dotmoe.common.numbers import ceil_div
from dotmoe.measure.config import InspectConfig
from dotmoe.measure.inspection.accelerators import Accelerator
from dotmoe.measure.inspection.operations import Operation, Operations, total
from dotmoe.measure.inspection.planner import USABLE_SHARE
from dotmoe.measure.inspection.sizes import (
    FLOAT32,
    STREAMS,
    Items,
    Sizes,
    Step,
    answers_memory,
    calibration_memory,
    evaluation_memory,
    export_memory,
    exported_bytes,
    gathered_parameters,
    repair_memory,
)
from dotmoe.method.config import RepairConfig
from dotmoe.method.dense_layers import OUTLIER_TOKENS
from dotmoe.method.repair import repair_tokens
from dotmoe.models.load import LARGEST_SHARE
from dotmoe.run.config import RunConfig, finetune_recipe
from dotmoe.text.config import AnswersConfig
from dotmoe.text.expected import Writing, expected_writing
from dotmoe.text.questions import asks_by_name
from dotmoe.text.tokenise import MOST_OWN_TOKENS, own_tokens_for, text_beside, tokens_to_read

ANSWER_BYTES = 10
"""Bytes of a file of answers for each token: the text, and the token's id."""
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
WRITING_ASSUMED = (
    "Answers are as long as those of SmolLM2 and Qwen2.5 on average; where they are in the cache, "
    "nothing is written again."
)

WHY_OF_A_STEP = {
    "forward": "teacher and student on the same tokens, all experts on",
    "head and loss": "logits of both, in chunks, and their divergence",
    "backward": "gradients of inputs, and of each neuron's mask, summed by expert",
    "assignment and optimizer": "transport, rounding and their gradients; Adam",
    "waiting for communication": "what computing does not hide",
}


class Stage(NamedTuple):
    """One stage: what it does, holds in memory, and writes to disk."""

    name: str
    operations: list[Operation]
    memory: Items
    written: int


class Stages:
    """The stages of a conversion whose config has its defaults; 0 tokens: no stage."""

    def __init__(self, sizes: Sizes, config: RunConfig, *, is_chat: bool = False) -> None:
        self.sizes = sizes
        self.config = config
        self.is_chat = is_chat
        self.seq_len = min(config.data.seq_len, sizes.widths.context)
        self.calibration_tokens = config.calibration_tokens(sizes.widths.model)
        self.repair_tokens = 0
        if config.repair:
            self.repair_tokens = repair_tokens(config.repairing, sizes.splits, sizes.config)
        self.compares_layers = config.experts.first_dense_layers is None
        """Whether the number of leading dense layers is measured."""
        wanted = max(self.calibration_tokens, self.repair_tokens)
        written = own_tokens_for(
            config.data, wanted, config.eval_tokens, has_heldout=bool(config.eval_text)
        )
        self.writing = expected_writing(config.data, config.answers, written, is_chat=is_chat)
        """What the dense model writes."""
        self.text_tokens = tokens_to_read(
            max(1, config.align.steps * config.align.batch_size) * self.seq_len, wanted
        )
        """Tokens of training text that are read, if there are so many."""
        if asks_by_name(config.data):
            written = config.answers.answer_tokens or written
            self.text_tokens = written + text_beside(config.data, written)

    def repaired(self) -> Iterator[tuple[str, "Stages"]]:
        """Options, and the same conversion with each of the `CHOICES` of fewer tokens."""
        most = repair_tokens(RepairConfig(), self.sizes.splits, self.sizes.config)
        for name, how in CHOICES.items():
            config = replace(self.config, repairing=how)
            other = Stages(self.sizes, config, is_chat=self.is_chat)
            if how.repair_tokens is None or other.repair_tokens < most:
                yield name, other

    def trainings(self) -> dict[str, tuple[Step, int]]:
        """A step of the alignment and of the finetuning, if any, and the tokens of all steps."""
        config, align = self.config, self.config.align
        trainings = {}
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

    def finetuning_writes(self) -> tuple[Writing, ...]:
        """What the model writes for the finetuning that is planned; nothing if it is given text."""
        _, tokens = self.trainings()["finetune"]
        if tokens > MOST_OWN_TOKENS:
            return ()
        how = AnswersConfig(heldout_answers=0)  # the conversion has written those
        return expected_writing(self.config.data, how, tokens, is_chat=self.is_chat)

    def hours_of_writing_to_finetune(self, machine: Accelerator) -> float:
        """Hours in which a machine writes the text of the finetuning that is planned."""
        work = Operations(self.sizes, self.config, self.seq_len, machine)
        return total(work.answers(self.finetuning_writes())).hours(machine)

    def on(self, machine: Accelerator, align: dict[str, Any] | None) -> dict[str, Any]:
        """Hours, memory and disk of each stage on a machine; `align` is the plan of an alignment.

        `fits` is whether the device has the memory.
        """
        rows = list[dict[str, Any]]()
        for stage in self._all(machine):
            items = self._as_placed(stage.memory, stage.name, machine)
            on_host = 0 if machine.on_cpu else items.get(STREAMS, 0)
            rows.append(
                {
                    "stage": stage.name,
                    "hours": total(stage.operations).hours(machine),
                    "operations": [each.on(machine) for each in stage.operations],
                    "memory": items,
                    "memory_total": sum(items.values()) - on_host,
                    "disk": stage.written,
                }
            )
        if align is not None:
            start = [row["stage"] for row in rows].index("extraction")
            rows.insert(start, self._aligned(align))
        for row in rows:
            row["fits"] = row["memory_total"] <= USABLE_SHARE * machine.memory_bytes
        hours = [row["hours"] for row in rows]
        return {
            **machine.place,
            "stages": rows,
            "hours": None if None in hours else sum(hours),
            "fits": all(row["fits"] for row in rows),
        }

    def _aligned(self, align: dict[str, Any]) -> dict[str, Any]:
        """The row of an alignment, as it is planned."""
        way = align["recommended"] or align["choices"][-1]
        step, tokens = self.trainings()["align"]
        steps = tokens // step.tokens
        trainables = self.sizes.affinities + self.sizes.counts.routers
        return {
            "stage": "alignment",
            "hours": align["hours"],
            "operations": [
                {
                    "operation": part,
                    "why": WHY_OF_A_STEP[part],
                    "held": steps * way["flop"].get(part, 0),
                    "moved": steps * way["bytes"].get(part, 0),
                    "hours": steps * part_s / 3_600,
                }
                for part, part_s in way["parts"].items()
            ],
            "disk": 6 * FLOAT32 * trainables,
            "memory": way["memory"],
            "memory_total": way["memory_total"],
        }

    def _as_placed(self, items: Items, stage: str, machine: Accelerator) -> Items:
        """The memory of a stage, with dense weights where `--sharding auto` puts them.

        What ranks divide for the start from data, rank zero reads from disk in its own stages.
        """
        weights = machine.weight_bytes * self.sizes.counts.dense_total
        ranks = machine.gpus
        if stage == "answers":  # written on one device
            return items
        is_whole = ranks == 1 or machine.on_cpu or weights <= LARGEST_SHARE * machine.memory_bytes
        if is_whole or "dense weights" not in items:
            return items
        in_memory = machine.weight_bytes * gathered_parameters(self.sizes)
        if stage == "start from data":
            in_memory += ceil_div(weights, ranks)
        return {**items, "dense weights": in_memory}

    def _states(self) -> int:
        """How often affinities and routers are written before any alignment.

        1_calibrate holds them, and 2_align, even without steps; an alignment has a row of its own.
        A split by another method writes none, unless its router is trained.
        """
        if self.config.align.steps:
            return 1
        return 2 if self.config.method == "dot_moe" else 0

    def _all(self, machine: Accelerator) -> Iterator[Stage]:
        """Each stage but the alignment, on one device."""
        sizes, config = self.sizes, self.config
        weight_bytes = machine.weight_bytes
        work = Operations(sizes, config, self.seq_len, machine)
        trainables = sizes.affinities + sizes.counts.routers
        read = self.text_tokens + config.eval_tokens
        if self.writing:
            tokens = sum(each.tokens + each.texts * each.read for each in self.writing)
            memory = answers_memory(sizes, self.writing, weight_bytes)
            yield Stage("answers", work.answers(self.writing), memory, ANSWER_BYTES * tokens)
        yield Stage("tokenise", work.tokenise(read), {}, FLOAT32 * read)
        if self.compares_layers:
            memory = calibration_memory(sizes, OUTLIER_TOKENS, weight_bytes)
            yield Stage("dense layers", work.compare_layers(), memory, 0)
        if self.calibration_tokens:
            memory = calibration_memory(sizes, self.calibration_tokens, weight_bytes)
            states = FLOAT32 * trainables * self._states()
            name = f"split by {config.method}"
            if config.method == "dot_moe":
                name = "start from data"
            yield Stage(name, work.calibrate(self.calibration_tokens), memory, states)
        units = sizes.widths.layers * sum(split.units for split in sizes.splits)
        yield Stage("extraction", [], {}, FLOAT32 * (units + sizes.counts.routers))
        if self.repair_tokens:
            memory = repair_memory(sizes, ceil_div(self.repair_tokens, machine.gpus), weight_bytes)
            copies = 3 if config.repairing.repair_epochs else 1
            written = sizes.stored.itemsize * sizes.repaired * copies
            yield Stage("repair", work.repair(self.repair_tokens), memory, written)
        memory = export_memory(sizes, config.export.verify_tokens, weight_bytes)
        yield Stage("export", work.export(), memory, sum(exported_bytes(sizes).values()))
        measured = work.evaluate(repaired=self.repair_tokens > 0)
        yield Stage("evaluation", measured, evaluation_memory(sizes, weight_bytes), 0)
