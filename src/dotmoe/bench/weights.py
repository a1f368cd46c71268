"""What a model must read and multiply for a token: bytes of weights and floating-point operations.

Of a Mixture-of-Experts only the chosen experts count. Caches, activations and look-up tables of
positions are left out of the bytes: they are the same in both models.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightGroup:
    """Weights that are used together."""

    num_bytes: int
    """Bytes as they lie in memory."""
    products: int
    """Multiply-adds a token: entries of the matrices, none of the vectors."""

    def __add__(self, other: "WeightGroup") -> "WeightGroup":
        return WeightGroup(
            num_bytes=self.num_bytes + other.num_bytes, products=self.products + other.products
        )


NOTHING = WeightGroup(num_bytes=0, products=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelWeights:
    """The weights of one decoder, grouped by when they are used."""

    embedding_row_bytes: int
    """One token's row of the input embedding."""
    head: WeightGroup
    """Output projection; the embedding itself if tied to it."""
    fixed: WeightGroup
    """Used for every token: attention, norms, routers, shared experts, FFNs of dense layers."""
    expert: WeightGroup
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

    At most min(E, T k), which is reached for one token.

    Example:
        >>> expected_experts(112, 28, 1), round(expected_experts(112, 28, 4), 1)
        (28.0, 76.6)
    """
    if num_experts == 0:
        return 0.0
    return num_experts * (1 - (1 - active_experts / num_experts) ** tokens)
