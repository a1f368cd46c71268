"""Turn a dense pretrained LLM into an ordinary sparse Mixture-of-Experts checkpoint.

import dotmoe

dotmoe.convert(dotmoe.recipe("qwen25_7b", out="run", data=("text.jsonl",)))
"""

__version__ = "0.1.0"
