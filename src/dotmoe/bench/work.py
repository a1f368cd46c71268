"""What a model must read and multiply for a token: bytes of weights and floating-point operations.

Of a Mixture-of-Experts only the chosen experts count. Caches, activations and look-up tables of
positions are left out of the bytes: they are the same in both models.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from dotmoe.models.refusals import expert_count

if TYPE_CHECKING:
    from dotmoe.export.gguf_file import GgufFile


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Weights that are used together."""

    num_bytes: int
    """Bytes as they lie in memory."""
    products: int
    """Multiply-adds a token: entries of the matrices, none of the vectors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The weights of one decoder, grouped by when they are used."""

    embedding_row_bytes: int
    """One token's row of the input embedding."""
    head: Weights
    """Output projection; the embedding itself if tied to it."""
    fixed: Weights
    """Used for every token: attention, norms, routers, shared experts, FFNs of dense layers."""
    expert: Weights
    """One expert of every split layer, over all of these layers."""
    num_experts: int
    """Experts a layer (E), 0 for a dense model."""
    active_experts: int
    """Experts that run per token (k), 0 for a dense model."""
    flops_per_key: int
    """Operations of all layers' attention for one token and one position that it attends to."""

    @classmethod
    def of_model(cls, model: Any) -> "Work":
        """Of a causal language model of Transformers, as it is held in memory."""
        config, experts = model.config, num_experts(model.config)
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        routed = {id(p) for module in expert_modules(model) for p in module.parameters()}
        tensors = [
            (p.nbytes, p.numel(), p.dim(), id(p) in routed)
            for p in model.parameters()
            if p is not embedding and p is not head
        ]
        fixed, expert = _grouped(tensors, experts)
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(
            embedding_row_bytes=embedding.nbytes // len(embedding),
            head=Weights(num_bytes=head.nbytes, products=head.numel()),
            fixed=fixed,
            expert=expert,
            num_experts=experts,
            active_experts=int(config.num_experts_per_tok) if experts else 0,
            flops_per_key=4 * heads * head_dim * config.num_hidden_layers,
        )

    @classmethod
    def of_gguf(cls, file: "GgufFile") -> "Work":
        """Of a GGUF file, from its header.

        Raises:
            UserError: It holds no decoder.
        """
        experts, heads = file.size("expert_count", 0), file.size("attention.head_count")
        head_dim = file.size("attention.key_length", file.size("embedding_length") // heads)
        tensors = {tensor.name: tensor for tensor in file.reader.tensors}
        embedding = tensors.pop("token_embd.weight")
        head = tensors.pop("output.weight", embedding)
        routed = re.compile(r"blk\.\d+\.ffn_(gate|up|down)_exps\.\w+")
        fixed, expert = _grouped(
            (
                (int(t.n_bytes), int(t.n_elements), len(t.shape), bool(routed.fullmatch(t.name)))
                for t in tensors.values()
            ),
            experts,
        )
        return cls(
            embedding_row_bytes=int(embedding.n_bytes) // int(embedding.shape[1]),
            head=Weights(num_bytes=int(head.n_bytes), products=int(head.n_elements)),
            fixed=fixed,
            expert=expert,
            num_experts=experts,
            active_experts=file.size("expert_used_count") if experts else 0,
            flops_per_key=4 * heads * head_dim * file.size("block_count"),
        )

    @property
    def stored_bytes(self) -> int:
        """All weights, without the rows of an embedding that is not the head."""
        return self.head.num_bytes + self.fixed.num_bytes + self.num_experts * self.expert.num_bytes

    def touched_bytes(self, tokens: int, experts_touched: float) -> float:
        """Bytes of weights that a step reads if it reads each weight that it needs once.

        Args:
            tokens: Tokens of the step, whose logits are all wanted.
            experts_touched: Distinct experts a split layer that run for any of them.
        """
        always = self.head.num_bytes + self.fixed.num_bytes
        return always + tokens * self.embedding_row_bytes + experts_touched * self.expert.num_bytes

    def flops(self, tokens: int, keys: float, *, head_rows: int) -> float:
        """Floating-point operations of a step in matrix products, 2 for a multiply and add.

        Args:
            tokens: Tokens of the step.
            keys: Positions that the tokens attend to, summed over the tokens.
            head_rows: Tokens whose logits are computed.
        """
        body = tokens * (self.fixed.products + self.active_experts * self.expert.products)
        return 2 * (body + head_rows * self.head.products) + keys * self.flops_per_key


def num_experts(config: Any) -> int:
    """Experts a layer (E) of a Hugging Face config; 0 for a dense model."""
    found = expert_count(config)
    return 0 if found is None else found[1]


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that hold the routed experts, by layer; all their weights are [E, ...]."""
    return [
        module
        for name, module in model.named_modules()
        if name.endswith(".experts") and any(p.dim() == 3 for p in module.parameters())
    ]


def causal_keys(tokens: int, before: int = 0) -> int:
    """Positions that `tokens` new tokens of one sequence attend to, summed over them.

    Example:
        >>> causal_keys(3), causal_keys(1, before=9)
        (6, 10)
    """
    return tokens * before + tokens * (tokens + 1) // 2


def expected_experts(num_experts: int, active_experts: int, tokens: int) -> float:
    """Distinct experts a layer if tokens were routed independently and evenly.

        E (1 - (1 - k / E)^T)

    Example:
        >>> expected_experts(112, 28, 1), round(expected_experts(112, 28, 4), 1)
        (28.0, 76.6)
    """
    return num_experts * (1 - (1 - active_experts / max(1, num_experts)) ** tokens)


def _grouped(
    tensors: Iterable[tuple[int, int, int, bool]], num_experts: int
) -> tuple[Weights, Weights]:
    """Sums over what every token uses, and over one expert.

    Args:
        tensors: Bytes, entries, dimensions, and whether it is a stack of experts, of each.
        num_experts: Experts in a stack.
    """
    num_bytes, products = {False: 0, True: 0}, {False: 0, True: 0}
    for size, entries, dims, is_routed in tensors:
        share = num_experts if is_routed else 1
        num_bytes[is_routed] += size // share
        if dims == 2 + is_routed:
            products[is_routed] += entries // share
    fixed, expert = (
        Weights(num_bytes=num_bytes[at], products=products[at]) for at in (False, True)
    )
    return fixed, expert
