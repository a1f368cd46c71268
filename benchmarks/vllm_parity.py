"""Exports in real vLLM against stock Transformers: log-probabilities and greedy text.

vLLM needs other package versions, so it runs in an environment of its own:

    scripts/vllm_environment.sh vllm-env
    python benchmarks/vllm_parity.py --vllm-python vllm-env/bin/python --real RUN

The quickstart's run is used if it exists, else made; its experts are also written as
`mixtral`, and a small random Qwen3 is converted for `qwen3_moe`. RUN is a finished run of a real
model. Results are kept in results/vllm_parity.json.
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

RESULTS = Path(__file__).resolve().parents[1] / "results" / "vllm_parity.json"
DTYPES = ("float32", "bfloat16", "float16")
PROMPTS = 200
GREEDY_PROMPTS = 5
GREEDY_TOKENS = 200
CONTEXT = 512
TEXT = "python-stdlib"


def main() -> None:
    """Measure every export in every dtype, or score one export for the other environment."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm-python", help="interpreter of an environment with vLLM")
    parser.add_argument("--run", type=Path, default=Path("quickstart-run/dot_moe"))
    parser.add_argument("--real", type=Path, nargs="*", default=[])
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--score", nargs=4, metavar=("WHO", "FOLDER", "DTYPE", "PROMPTS"))
    arguments = parser.parse_args()
    if arguments.score:
        who, folder, dtype, prompts = arguments.score
        scorer = in_vllm if who == "vllm" else in_transformers
        print(json.dumps(scorer(folder, dtype, json.loads(Path(prompts).read_text()))))
        return
    if not arguments.vllm_python:
        parser.error("--vllm-python is missing; scripts/vllm_environment.sh makes one")
    compare(arguments)


def compare(arguments: argparse.Namespace) -> None:
    """Write one row for every export and dtype."""
    from dotmoe.run.folder import provenance

    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, (folder, prompts) in exports(arguments, Path(scratch)).items():
            given = Path(scratch) / "prompts.json"
            given.write_text(json.dumps(prompts))
            exact = scored(sys.executable, "transformers", folder, "float32", given)
            for dtype in DTYPES:
                stock = exact
                if dtype != "float32":
                    stock = scored(sys.executable, "transformers", folder, dtype, given)
                server = scored(arguments.vllm_python, "vllm", folder, dtype, given)
                rows.append(
                    {"export": name, "dtype": dtype, "vllm": server["version"]}
                    | difference(server, stock)
                    | {"mean_to_float32": difference(server, exact)["mean"]}
                    | {"stock_mean_to_float32": difference(stock, exact)["mean"]}
                )
                print(rows[-1], file=sys.stderr, flush=True)
                record = {"origin": "measured", "rows": rows, "provenance": provenance(0)}
                arguments.out.write_text(json.dumps(record, indent=2) + "\n")


def exports(
    arguments: argparse.Namespace, scratch: Path
) -> dict[str, tuple[Path, list[list[int]]]]:
    """Folder and prompts of each export to measure."""
    from dotmoe.export.record import ExportRecord

    run = arguments.run
    if not (run / "5_export").is_dir():
        dotmoe("quickstart", "--out", str(run.parent))
    dotmoe("export", str(run), str(scratch / "mixtral"), "--format", "mixtral")
    dense = random_qwen3(scratch / "dense")
    dotmoe(
        *("convert", str(dense), str(scratch / "qwen3"), "--data", TEXT, "--steps", "0"),
        *("--experts", "32", "--active", "0.25", "--format", "qwen3_moe", "--seq-len", "256"),
        *("--eval-tokens", "4096", "--export-dtype", "float32"),
    )
    return {
        "quickstart as glm4_moe": (run / "5_export", prompts_of(run, arguments.prompts)),
        "quickstart as mixtral": (scratch / "mixtral", prompts_of(run, arguments.prompts)),
        "random Qwen3 as qwen3_moe": (
            scratch / "qwen3" / "5_export",
            prompts_of(scratch / "qwen3", arguments.prompts),
        ),
        **{
            f"{run.name} as {ExportRecord.load(run / '5_export').format}": (
                run / "5_export",
                prompts_of(run, arguments.prompts),
            )
            for run in arguments.real
        },
    }


def dotmoe(*words: str) -> None:
    """Run one command."""
    subprocess.run([sys.executable, "-m", "dotmoe", *words], check=True, stdout=sys.stderr)


def random_qwen3(folder: Path) -> Path:
    """A small Qwen3 with random weights, large in scale so that its routing is sharp."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    import dotmoe as package

    tokenizer = AutoTokenizer.from_pretrained(Path(package.__file__).parent / "embedded")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def prompts_of(run: Path, count: int) -> list[list[int]]:
    """Prompts of 64 to 255 tokens from a run's held-out text."""
    from safetensors.torch import load_file

    (tokens_BT,) = load_file(run / "0_data" / "heldout.safetensors").values()
    lengths = [64 + (37 * i) % 192 for i in range(count)]
    return [tokens_BT[i % len(tokens_BT)][:length].tolist() for i, length in enumerate(lengths)]


def scored(python: str, who: str, folder: Path, dtype: str, prompts: Path) -> dict[str, Any]:
    """Scores of every prompt in one runtime, from a process of its own."""
    command = [python, __file__, "--score", who, str(folder), dtype, str(prompts)]
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    if who == "vllm":
        environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{who} {folder} {dtype} failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def in_transformers(folder: str, dtype: str, prompts: list[list[int]]) -> dict[str, Any]:
    """Log-probability of each token after the first, most likely tokens, and greedy text."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    nats, best, greedy = [], [], []
    with torch.inference_mode():
        for prompt in prompts:
            tokens = torch.tensor([prompt])
            logprobs = model(tokens).logits[0, :-1].float().log_softmax(-1)
            nats += logprobs.gather(1, tokens[0, 1:, None])[:, 0].tolist()
            best += logprobs.argmax(-1).tolist()
        for prompt in prompts[:GREEDY_PROMPTS]:
            given = torch.tensor([prompt[:24]])
            made = model.generate(
                given,
                attention_mask=torch.ones_like(given),
                do_sample=False,
                max_new_tokens=GREEDY_TOKENS,
                min_new_tokens=GREEDY_TOKENS,
            )
            greedy.append(made[0, given.shape[1] :].tolist())
    return {"version": transformers.__version__, "nats": nats, "best": best, "greedy": greedy}


def in_vllm(folder: str, dtype: str, prompts: list[list[int]]) -> dict[str, Any]:
    """`in_transformers` in vLLM; runs in its environment and imports nothing of ours."""
    import vllm

    model = vllm.LLM(
        model=folder, dtype=dtype, enforce_eager=True, max_model_len=CONTEXT, max_num_seqs=8
    )
    asked = vllm.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    outputs = model.generate([{"prompt_token_ids": p} for p in prompts], asked)
    nats, best = [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        for token, choices in zip(prompt[1:], output.prompt_logprobs[1:], strict=True):
            nats.append(choices[token].logprob)
            best.append(max(choices, key=lambda word: choices[word].logprob))
    asked = vllm.SamplingParams(
        max_tokens=GREEDY_TOKENS, min_tokens=GREEDY_TOKENS, temperature=0, ignore_eos=True
    )
    starts = [{"prompt_token_ids": p[:24]} for p in prompts[:GREEDY_PROMPTS]]
    greedy = [list(o.outputs[0].token_ids) for o in model.generate(starts, asked)]
    return {"version": vllm.__version__, "nats": nats, "best": best, "greedy": greedy}


def difference(server: dict[str, Any], stock: dict[str, Any]) -> dict[str, Any]:
    """Differences of the log-probabilities of the actual tokens, and their effects."""
    pairs = list(zip(server["nats"], stock["nats"], strict=True))
    apart = sorted(abs(a - b) for a, b in pairs)
    same = [a == b for a, b in zip(server["best"], stock["best"], strict=True)]
    return {
        "tokens": len(pairs),
        "mean": sum(apart) / len(apart),
        "p99": apart[int(0.99 * len(apart))],
        "max": apart[-1],
        "top1_equal": sum(same) / len(same),
        "perplexity": perplexity(server["nats"]),
        "stock_perplexity": perplexity(stock["nats"]),
        "greedy_equal": [
            next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
            for x, y in zip(server["greedy"], stock["greedy"], strict=True)
        ],
    }


def perplexity(nats: list[float]) -> float:
    """Perplexity of log-probabilities."""
    return math.exp(-sum(nats) / len(nats))


if __name__ == "__main__":
    main()
