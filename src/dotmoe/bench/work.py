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

    num_bytes: int = 0
    """Bytes as they lie in memory."""
    products: int = 0
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
    late_products: int
    """Multiply-adds a token, counted in `fixed` and `expert`, that the runtime does only for tokens
    whose logits are wanted: the last layer's FFN in llama.cpp; 0 in Transformers."""
    layers: int
    heads: int
    """Query heads a layer."""
    head_dim: int

    @classmethod
    def of_model(cls, model: Any) -> "Work":
        """Of a causal language model of Transformers, as it is held in memory."""
        config = model.config
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        experts = num_experts(config)
        routed = {id(p) for module in expert_modules(model) for p in module.parameters()}
        body = [p for p in model.parameters() if p is not embedding and p is not head]
        heads = config.num_attention_heads
        return cls(
            embedding_row_bytes=embedding.shape[1] * embedding.element_size(),
            head=_sum((p.nbytes, p.numel(), True) for p in [head]),
            fixed=_sum((p.nbytes, p.numel(), p.dim() == 2) for p in body if id(p) not in routed),
            expert=_sum(
                (p.nbytes // experts, p.numel() // experts, p.dim() == 3)
                for p in body
                if id(p) in routed
            ),
            num_experts=experts,
            active_experts=int(config.num_experts_per_tok) if experts else 0,
            late_products=0,
            layers=config.num_hidden_layers,
            heads=heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        )

    @classmethod
    def of_gguf(cls, file: "GgufFile") -> "Work":
        """Of a GGUF file, from its header.

        Raises:
            UserError: It holds no decoder.
        """
        experts = file.size("expert_count", 0)
        active = file.size("expert_used_count", 0) if experts else 0
        layers, width = file.size("block_count"), file.size("embedding_length")
        heads = file.size("attention.head_count")
        tensors = {tensor.name: tensor for tensor in file.reader.tensors}
        embedding = tensors.pop("token_embd.weight")
        head = tensors.pop("output.weight", embedding)
        fixed: list[tuple[int, int, bool]] = []
        routed: list[tuple[int, int, bool]] = []
        late = 0
        for name, tensor in tensors.items():
            is_routed = re.fullmatch(r"blk\.\d+\.ffn_(gate|up|down)_exps\.\w+", name) is not None
            share = experts if is_routed else 1
            is_matrix = sum(int(size) > 1 for size in tensor.shape) >= 2 + is_routed
            entry = int(tensor.n_bytes) // share, int(tensor.n_elements) // share, is_matrix
            (routed if is_routed else fixed).append(entry)
            if is_matrix and name.startswith(f"blk.{layers - 1}.ffn_"):
                late += entry[1] * (active if is_routed else 1)
        return cls(
            embedding_row_bytes=int(embedding.n_bytes) // int(embedding.shape[1]),
            head=_sum([(int(head.n_bytes), int(head.n_elements), True)]),
            fixed=_sum(fixed),
            expert=_sum(routed),
            num_experts=experts,
            active_experts=active,
            late_products=late,
            layers=layers,
            heads=heads,
            head_dim=file.size("attention.key_length", width // heads),
        )

    @property
    def stored_bytes(self) -> int:
        """All weights, without the rows of an embedding that is not the head."""
        return self.head.num_bytes + self.fixed.num_bytes + self.num_experts * self.expert.num_bytes

    @property
    def flops_per_key(self) -> int:
        """Operations of all layers' attention for one token and one position that it attends to."""
        return 4 * self.heads * self.head_dim * self.layers

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
        body -= (tokens - head_rows) * self.late_products
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


def _sum(tensors: Iterable[tuple[int, int, bool]]) -> Weights:
    """Of tensors as (bytes, entries, whether they are matrices)."""
    entries = list(tensors)
    return Weights(
        num_bytes=sum(num_bytes for num_bytes, _, _ in entries),
        products=sum(count for _, count, is_matrix in entries if is_matrix),
    )
