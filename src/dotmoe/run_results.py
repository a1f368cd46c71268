"""What the result file and the model card of a run say, from what was measured."""

from pathlib import Path
from typing import Any

from dotmoe.export import VerificationRecord


def verification_figures(record: VerificationRecord | None) -> dict[str, Any]:
    """The export's verification in a few figures: the worst layer, and the whole model."""
    assert record is not None
    return {
        "tokens": record.tokens,
        "dtype": record.dtype,
        "largest_block_error": max(layer.block_error for layer in record.layers),
        "largest_misrouted_share": max(layer.misrouted for layer in record.layers),
        "logits_error": record.logits_error,
        "top1_agreement": record.top1_agreement,
        "all_experts_logits_error": record.dense_error,
    }


def card_rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of the model card's results table."""
    return [
        {
            "model": name,
            "perplexity": f"{result['perplexity']:.3f}",
            "unit": result["unit"],
            "window": result["window"],
            "text": ", ".join(Path(source).name for source in result["text"]),
        }
        for name, result in results.items()
    ]
