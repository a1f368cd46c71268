"""The paper's method: granularity, transport, routing, masked FFNs, alignment, repair, finetuning."""
