"""What each stage of a conversion does, as one table: stage, operation, work and why.

Work is FLOP of matrix products by dtype, bytes that other operations move, and what is read from
disk, tokenised and exchanged. Alignment, repair and finetuning use all GPUs, the other stages one.
Passes and shares are those of `planner`; what is fitted or assumed is in `UNMEASURED`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dotmoe.common.numbers import ceil_div
from dotmoe.measure.inspection.accelerators import Accelerator
from dotmoe.measure.inspection.planner import ADAM_BYTES, ASSIGNMENT_BYTES
from dotmoe.measure.inspection.sizes import FLOAT32, Sizes, exported_bytes
from dotmoe.method.calibrate import START_ROUNDS
from dotmoe.method.dense_layers import OUTLIER_TOKENS
from dotmoe.method.repair import BATCH, HELD_OUT_ROWS, SOLUTIONS
from dotmoe.method.sparse import whole_is_faster
from dotmoe.run.config import RunConfig
from dotmoe.text.expected import Writing

TOKENS_PER_S = 200_000
"""Tokens that one CPU thread tokenises in a second, measured with SmolLM2's tokenizer."""
DISK_BYTES_PER_S = 10**9
"""Bytes that a disk reads or writes in a second, assumed."""
LAYER_S = 1e-3
"""Seconds that a layer takes for one token of each row, beside its work: measured on a CPU, for
GPUs assumed."""
SOLVER_STEPS = 40
"""Newton steps of a transport problem in the start from data, fitted."""
ENERGY_PASSES, INPUT_PASSES = 90, 45
"""Passes over a layer's energies, [T, N] in float32, and its inputs, [T, D] in float64, of all
rounds of the start, fitted: a product with as few columns as experts is bound by memory."""


class Work(NamedTuple):
    """What an operation costs one device."""

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
    layers: int = 0
    """Layers that run for one token of each row: too little work to hide how it is started."""

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
        rest += self.exchanged / machine.link + self.layers * LAYER_S
        return (products / share.products + moved + rest) / 3_600


class Operation(NamedTuple):
    """One line of the table: a part of a stage."""

    what: str
    work: Work
    why: str

    def on(self, machine: Accelerator) -> dict[str, Any]:
        """The line as JSON values, with its hours on one device of a machine."""
        work = {name: value for name, value in self.work._asdict().items() if value}
        return {
            "operation": self.what,
            "why": self.why,
            **work,
            "hours": self.work.hours(machine),
        }


def total(operations: Sequence[Operation]) -> Work:
    """The sum of the work of some operations."""
    return Work(
        **{name: sum(getattr(each.work, name) for each in operations) for name in Work._fields}
    )


class Operations:
    """The operations of each stage on one device of a machine, for a config with its defaults."""

    def __init__(self, sizes: Sizes, config: RunConfig, seq_len: int, machine: Accelerator) -> None:
        self.sizes = sizes
        self.config = config
        self.seq_len = seq_len
        self.machine = machine

    def answers(self, writing: Sequence[Writing]) -> list[Operation]:
        """The dense model writes its own text."""
        return [each for kind in writing for each in self._written(kind)]

    def _written(self, kind: Writing) -> list[Operation]:
        """Texts of one kind: what they answer is read at once, then each token of each batch."""
        sizes, counts = self.sizes, self.sizes.counts
        layers = sizes.widths.layers
        head = sizes.widths.model * sizes.widths.vocabulary
        weights = counts.attention_and_norms + counts.ffn_total + head
        context = kind.read + kind.written // 2
        entries = 2 * layers * sizes.queries * context
        steps = kind.batches * kind.longest
        moved = kind.tokens * entries * self.machine.cache_bytes
        moved += steps * self.machine.weight_bytes * weights
        operations = [
            Operation(
                f"{kind.what}: {kind.tokens:,} tokens",
                Work(
                    held=kind.tokens * (2 * weights + 2 * entries),
                    moved=moved,
                    layers=steps * layers,
                ),
                f"{kind.texts:,} of about {kind.written} tokens, {kind.rows} at once, to the end "
                f"of the longest ({kind.longest}); a step reads all weights, keys and values",
            )
        ]
        if kind.read > 1:
            read = self._forward(kind.texts * kind.read, kind.read)
            why = f"{kind.texts:,} of about {kind.read} tokens, each once"
            operations.insert(0, Operation(f"{kind.what}: what is asked", read, why))
        return operations

    def tokenise(self, tokens: int) -> list[Operation]:
        """Text becomes token ids."""
        return [Operation("tokens", Work(tokens=tokens), "training and held-out text, one thread")]

    def compare_layers(self) -> list[Operation]:
        """How much each layer loses if neurons are off."""
        again = Work(held=4 * 2 * self.sizes.counts.ffn_total // 3 * OUTLIER_TOKENS)
        return [
            self._stream(OUTLIER_TOKENS),
            Operation("FFNs", again, "each once more, and its output with neurons off"),
        ]

    def calibrate(self, tokens: int) -> list[Operation]:
        """The start from data; of another method the stream alone."""
        stream = self._stream(tokens)
        if self.config.method != "dot_moe":
            return [stream]
        split, widths = self.sizes.split, self.sizes.widths
        width, layers = widths.model, widths.layers
        experts, units = split.num_experts, split.units
        routers = START_ROUNDS + 1
        a_router = (4 * tokens + 2 * width) * width * experts
        return [
            stream,
            Operation(
                "energies of neurons",
                Work(
                    held=4 * layers * units * width * tokens,
                    single=layers * START_ROUNDS * 2 * tokens * experts * units,
                    moved=layers * tokens * ENERGY_PASSES * FLOAT32 * units,
                ),
                "what each neuron adds to its layer's output; sums by experts, each round",
            ),
            Operation(
                "ridge routers",
                Work(
                    single=layers * START_ROUNDS * 2 * tokens * experts * width,
                    double=layers * (2 * tokens * width**2 + width**3 // 3 + routers * a_router),
                    moved=layers * tokens * INPUT_PASSES * 8 * width,
                ),
                "one Gram matrix of the inputs, and a solution for each round",
            ),
            Operation(
                "transport",
                Work(
                    moved=layers
                    * START_ROUNDS
                    * SOLVER_STEPS
                    * ASSIGNMENT_BYTES
                    * units
                    * split.columns
                ),
                "Newton steps on the plan of neurons and experts, each round",
            ),
        ]

    def repair(self, tokens: int) -> list[Operation]:
        """Repair on one of the ranks, which divide the tokens."""
        tokens = ceil_div(tokens, self.machine.gpus)
        operations = [
            self._streams(tokens),
            Operation(
                "refit",
                self._refit(tokens),
                "Gram matrices, one triangle, and solutions of output projections; of FFNs if they "
                "are not trained; ranks exchange the sums",
            ),
        ]
        if self.sizes.split.target != "ffn":
            return operations
        return [
            *operations,
            Operation(
                "masked FFNs",
                self._masked_ffns(tokens),
                "the repaired stream runs the chosen experts",
            ),
            Operation(
                "training",
                self._ffn_training(tokens),
                "all projections of each FFN; 7/3 forwards, as inputs need no gradient; ranks "
                "divide the neurons",
            ),
        ]

    def _trained_tokens(self, tokens: int) -> int:
        """Tokens that the training of FFNs reads in all its epochs; 0: none is trained."""
        return self.config.repairing.repair_epochs * tokens * (HELD_OUT_ROWS - 1) // HELD_OUT_ROWS

    def _hidden_bytes(self) -> int:
        """Bytes of all passes over the hidden neurons of a token, in float32."""
        passes = self.machine.efficiency.neurons
        return passes * self.sizes.widths.ffn * self.sizes.moe_layers * FLOAT32

    def _streams(self, tokens: int) -> Operation:
        """Dense and repaired stream; the FFNs' again if heads follow.

        If FFNs are trained, one of the two runs no whole FFN: only a Gram matrix needs it.
        """
        passes = 2
        why = "dense and repaired, each through every layer"
        if self.sizes.has_heads:
            passes = 3
            why += "; that of the FFNs again for the heads"
        work = self._forward(passes * tokens)
        if self.sizes.split.target == "ffn" and self._trained_tokens(tokens):
            work = work._replace(
                held=work.held - 2 * self.sizes.counts.ffn_total * tokens,
                moved=work.moved - tokens * self._hidden_bytes(),
            )
            why += "; the repaired one without whole FFNs"
        return Operation("streams", work, why)

    def _masked_ffns(self, tokens: int) -> Work:
        """The FFNs of the repaired stream by their experts."""
        whole = 2 * self.sizes.counts.ffn_total
        return Work(held=int(whole * self.sizes.split.active_fraction) * tokens)

    def _refit(self, tokens: int) -> Work:
        """Sums of one triangle over tokens, on a CPU of the experts that run; and solutions.

        Ranks exchange the sums.
        """
        sizes, width = self.sizes, self.sizes.widths.model
        ranks = self.machine.gpus
        tried = SOLUTIONS - 1
        grams, solutions, entries = 0, 0, 0
        for split, n in zip(sizes.splits, sizes.repaired_inputs, strict=True):
            if split.target != "attention" and self.config.repairing.repair_epochs:
                continue
            pairs = n**2 // 2
            columns = n
            if self.machine.on_cpu:
                always = n * split.shared_size // split.units
                run = (n - always) * split.active_experts // split.num_experts
                pairs = run * ((n - always) // 2 + always) + always**2
                columns = run + always
            grams += 2 * tokens * (pairs + columns * width)
            solutions += (tried + 1) * n**2 * (n // 3 + 2 * width) + tried * 2 * n**2 * width
            entries += 2 * n**2
        matrices = sizes.moe_layers * entries
        return Work(
            single=sizes.moe_layers * grams,
            double=sizes.moe_layers * solutions,
            exchanged=2 * (ranks - 1) * 2 * FLOAT32 * matrices // ranks,
        )

    def _ffn_training(self, tokens: int) -> Work:
        """Training of all FFNs: 7/3 forwards of the experts that run, as inputs need no gradient.

        Ranks exchange inputs and outputs. A GPU with weights of 16 bits trains in TF32, at half the
        rate of bfloat16.
        """
        trained = self._trained_tokens(tokens)
        if not trained:
            return Work()
        sizes, split, machine = self.sizes, self.sizes.split, self.machine
        device = torch.device("cpu" if machine.on_cpu else "cuda")
        active = split.active_experts / split.num_experts
        share = split.active_fraction
        if whole_is_faster(device, torch.float32, active, split.expert_size):
            share = 1.0
        run = int(sizes.counts.ffn_total * share)
        heldout = 2 * 2 * run * tokens // HELD_OUT_ROWS
        products = 14 * run // 3 * trained + heldout
        updated = trained * sizes.counts.ffn_total // BATCH  # by all steps, on one rank
        moved = trained * 3 * self._hidden_bytes() + ADAM_BYTES * updated
        given = (machine.gpus - 1) * 3 * FLOAT32 * sizes.widths.model * sizes.moe_layers * trained
        if machine.weight_bytes == 2 and not machine.on_cpu:
            return Work(held=2 * products, moved=moved, exchanged=given)
        return Work(single=products, moved=moved, exchanged=given)

    def export(self) -> list[Operation]:
        """Writing and reading the export, and its verification in float32."""
        how = self.config.export
        sizes, widths = self.sizes, self.sizes.widths
        written = sum(exported_bytes(sizes).values())
        read = sizes.stored.itemsize * sizes.counts.dense_total
        verified = 4 * how.verify_tokens
        forwards = self._forward(2 * how.scale_tokens + verified)
        return [
            Operation("files", Work(disk=3 * written + 4 * read), "written, read again, hashed"),
            Operation(
                "forwards",
                Work(single=forwards.held, moved=2 * forwards.moved),
                "the scale of routers, and dense model and export side by side, in float32",
            ),
            Operation(
                "logits", Work(single=2 * widths.model * widths.vocabulary * verified), "of both"
            ),
        ]

    def evaluate(self, *, repaired: bool) -> list[Operation]:
        """Perplexity of dense model and export and, before a repair, of the masked model."""
        models = 3 if repaired else 2
        why = f"{models} models on the held-out text"
        tokens = models * self.config.eval_tokens
        widths = self.sizes.widths
        logits = widths.vocabulary * tokens
        passes = self.machine.efficiency.vocabulary // 4
        moved = passes * self.machine.weight_bytes * logits
        read = sum(exported_bytes(self.sizes).values())
        return [
            Operation("forwards", self._forward(tokens), why),
            Operation("logits", Work(held=2 * widths.model * logits, moved=moved), why),
            Operation("files", Work(disk=read), "the export is loaded"),
        ]

    def _stream(self, tokens: int) -> Operation:
        return Operation("stream", self._forward(tokens), f"{tokens:,} tokens through every layer")

    def _forward(self, tokens: int, context: int | None = None) -> Work:
        """A forward pass of the decoder layers of the dense model; `context` is not a block's."""
        counts, widths = self.sizes.counts, self.sizes.widths
        share = self.machine.efficiency
        passes = share.width * widths.model + share.neurons * widths.ffn
        scores = 4 * (context or self.seq_len) * self.sizes.queries * widths.layers
        return Work(
            held=(2 * (counts.attention_and_norms + counts.ffn_total) + scores) * tokens,
            moved=self.machine.weight_bytes * widths.layers * passes * tokens,
        )
