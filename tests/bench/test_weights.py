"""Bytes and operations, beside counts that were made another way."""

import re
from itertools import combinations, product

import pytest
import torch
from safetensors import safe_open
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from dotmoe.bench.transformers_runner import watched_experts
from dotmoe.bench.transformers_weights import model_weights
from dotmoe.bench.weights import causal_keys, expected_experts
from dotmoe.export import OUTPUTS

TOKENS = 7


def loaded(folder, **options):
    options = {"attn_implementation": "eager", **options}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


def counted(model, tokens, head_rows):
    """Operations in products with weights and in attention, counted while they run."""
    ids_BT = torch.arange(tokens)[None]
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(input_ids=ids_BT, use_cache=False, logits_to_keep=head_rows)
    counts = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    attention = counts.pop("aten.bmm")
    return sum(counts.values()), attention


def stored(folder):
    """Bytes of every tensor in the checkpoint's files."""
    sizes = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                tensor = file.get_tensor(name)
                sizes[name] = tensor.numel() * tensor.element_size()
    return sizes


@pytest.mark.parametrize("name", ["dense", "glm4_moe", "mixtral"])
@pytest.mark.parametrize("head_rows", [1, TOKENS])
def test_operations_are_those_that_torch_counts(pair, name, head_rows):
    options = {} if name == "dense" else {"experts_implementation": "eager"}
    model = loaded(pair / name, **options)
    weights = model_weights(model)
    in_products, in_attention = counted(model, TOKENS, head_rows)
    assert weights.flops(TOKENS, 0, head_rows=head_rows) == in_products
    # Eager attention also computes what the mask then hides.
    assert TOKENS**2 * weights.flops_per_key == in_attention


@pytest.mark.parametrize("name", ["glm4_moe", "mixtral"])
def test_bytes_are_those_of_the_files(pair, name):
    weights = model_weights(loaded(pair / name))
    sizes = stored(pair / name)
    is_expert = {key: re.search(r"\.experts\.(\d+)\.", key) for key in sizes}
    # A bias of the choice, which is no parameter once it is loaded.
    extra = sum(size for key, size in sizes.items() if "score_correction" in key)
    embedding = sizes["model.embed_tokens.weight"]
    rows = loaded(pair / name).config.vocab_size
    always = sum(sizes[key] for key, found in is_expert.items() if not found) - embedding - extra
    chosen = sum(sizes[key] for key, found in is_expert.items() if found and int(found[1]) < 3)
    assert weights.touched_bytes(1, 3) == always + chosen + embedding // rows
    assert weights.stored_bytes == sum(sizes.values()) - embedding - extra


def test_a_tied_head_is_read_whole_and_once(tiny_dense):
    folder = tiny_dense("llama", tied=True)
    weights = model_weights(loaded(folder))
    sizes = stored(folder)
    assert "lm_head.weight" not in sizes
    assert weights.head.num_bytes == sizes["model.embed_tokens.weight"]
    assert weights.stored_bytes == sum(sizes.values())


def test_distinct_experts_are_counted_at_the_router(pair):
    model, output = loaded(pair / "glm4_moe"), OUTPUTS["glm4_moe"]
    blocks = output.blocks(model)
    inputs = []
    for block in blocks:
        block.register_forward_pre_hook(lambda module, args: inputs.append(args[0].flatten(0, 1)))
    ids_BT = torch.randint(320, (5, 1), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), watched_experts(model) as touched:
        model(ids_BT)
    expected = [
        len(set(output.chosen_experts(block, x_TD).flatten().tolist()))
        for block, x_TD in zip(blocks, inputs, strict=True)
    ]
    assert touched == expected
    assert 3 < max(touched) <= 12


def test_expected_experts_is_the_mean_over_all_independent_choices():
    choices = list(combinations(range(5), 2))
    distinct = [len({*a, *b, *c}) for a, b, c in product(choices, repeat=3)]
    assert expected_experts(5, 2, 3) == pytest.approx(sum(distinct) / len(distinct), rel=1e-12)
    assert expected_experts(0, 0, 3) == 0


def test_causal_keys_is_the_sum_of_what_a_mask_lets_through():
    mask = torch.ones(9, 9).tril()
    assert causal_keys(9) == int(mask.sum())
    assert causal_keys(4, before=5) == int(mask[5:].sum())
