"""Continuations and their repetition. Oracles: argmax token by token, and figures by hand."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dotmoe.errors import UserError
from dotmoe.evaluate import EvaluateConfig, TextConfig, evaluate
from dotmoe.evaluate.config import GenerateConfig
from dotmoe.evaluate.generation import continuations, loop_tokens, repetition

PROMPTS = [[0, 40, 41, 42], [0, 99, 98, 97, 96, 95]]
BLOCK = [4, 9, 2, 7, 5]
PROSE = list(range(100, 140))


@pytest.fixture
def model(tiny_dense):
    return AutoModelForCausalLM.from_pretrained(tiny_dense("llama")).eval()


@pytest.fixture
def tokenizer(tiny_dense):
    return AutoTokenizer.from_pretrained(tiny_dense("llama"))


def argmaxed(model, prompt, new_tokens, end):
    ids = list(prompt)
    for _ in range(new_tokens):
        with torch.no_grad():
            token = int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
        if token == end:
            break
        ids.append(token)
    return ids[len(prompt) :]


def test_greedy_is_the_argmax_token_by_token_whatever_the_model_prefers(model, tokenizer):
    model.generation_config.repetition_penalty = 2.0
    model.generation_config.no_repeat_ngram_size = 1
    made = continuations(model, tokenizer, PROMPTS, GenerateConfig(generate=12))
    expected = [argmaxed(model, prompt, 12, tokenizer.eos_token_id) for prompt in PROMPTS]
    assert made["greedy"] == expected


def test_sampling_is_drawn_from_the_seed_and_a_top_p_near_nothing_is_greedy(model, tokenizer):
    options = [{"sampling_seed": 0}, {"sampling_seed": 0}, {"sampling_seed": 5}, {"top_p": 1e-6}]
    first, again, other, likeliest = (
        continuations(model, tokenizer, PROMPTS, GenerateConfig(generate=16, **each))
        for each in options
    )
    assert first["sampled"] == again["sampled"] != other["sampled"]
    assert likeliest["sampled"] == likeliest["greedy"] == first["greedy"]


def test_an_end_of_text_ends_the_continuation_and_is_not_in_it(model, tokenizer):
    free = argmaxed(model, PROMPTS[0], 8, None)
    tokenizer.eos_token_id = free[3]
    made = continuations(model, tokenizer, PROMPTS[:1], GenerateConfig(generate=8))
    assert made["greedy"] == [free[: free.index(free[3])]]


@pytest.mark.parametrize(
    ("size", "prompts"),
    [(8, ["Some te", " long en", "h to be "]), (130, ["Some text, long enough to be cut. " * 3])],
)
def test_both_models_continue_the_same_prompts_cut_at_equal_distances(
    size, prompts, tiny_dense, model, tokenizer, tmp_path
):
    """Of a text that is shorter than a prompt there is one, all of it."""
    (tmp_path / "text.txt").write_text("Some text, long enough to be cut. " * 3)  # 103 tokens
    names = {"model": tiny_dense("llama"), "against": tiny_dense("llama", rms_norm_eps=1e-2)}
    generation = GenerateConfig(generate=6, num_prompts=9 if size == 8 else 3, prompt_tokens=size)
    corpus = TextConfig(text=(str(tmp_path / "text.txt"),))
    options = {label: str(folder) for label, folder in names.items()}
    found = evaluate(EvaluateConfig(generation=generation, corpus=corpus, **options))
    ours, theirs = found["model"], found["against"]
    assert ours["prompts"] == theirs["prompts"]
    assert ours["prompts"][: len(prompts)] == prompts  # <s> is before the first
    assert ours["greedy"]["texts"] != theirs["greedy"]["texts"]
    ids = argmaxed(model, tokenizer(ours["prompts"][0]).input_ids, 6, 1)
    assert tokenizer.decode(ids) == ours["greedy"]["texts"][0]
    assert ours["greedy"]["repetition"]["tokens"] <= 6 * len(ours["prompts"])
    assert found["settings"]["generate"] == 6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"generate": 300}, "context is 256"),
        ({"generate": 4, "temperature": 0.0}, "temperature is 0.0"),
        ({"generate": 4, "prompts": ()}, "or --prompts"),
    ],
)
def test_settings_out_of_range_are_refused(options, words, tiny_dense):
    generation = GenerateConfig(**{"prompts": ("a",), **options})
    with pytest.raises(UserError, match=words):
        evaluate(EvaluateConfig(model=str(tiny_dense("llama")), generation=generation))


def in_loops(tokens):
    """Places in a loop, straight from the definition: every stretch, every period."""
    inside = set()
    for start in range(len(tokens)):
        for end in range(start + 12, len(tokens) + 1):
            stretch = tokens[start:end]
            periods = range(1, min(64, len(stretch) // 3) + 1)
            if any(stretch[p:] == stretch[:-p] for p in periods):
                inside |= set(range(start, end))
    return [place in inside for place in range(len(tokens))]


@pytest.mark.parametrize(
    ("tokens", "looping"),
    [
        (BLOCK * 3, 15),
        (BLOCK * 2 + [4], 0),
        (PROSE + BLOCK * 4 + [4, 9], 22),
        ([1] * 11, 0),
        (PROSE + [1] * 12 + PROSE, 12),
        (BLOCK * 3 + PROSE + [8, 3] * 7, 29),
        (list(range(64)) * 3, 192),
        (list(range(65)) * 3, 0),  # longer than the longest block
    ],
)
def test_loops_made_by_hand_are_found_token_for_token(tokens, looping):
    assert sum(loop_tokens(tokens)) == looping
    assert len(tokens) > 150 or loop_tokens(tokens) == in_loops(tokens)


def test_figures_by_hand():
    found = repetition([[1, 2, 3, 1, 2, 3], [1, 2]])  # 2-grams: 12 23 31 12 23, and 12
    assert (found["distinct_1"], found["distinct_2"]) == (3 / 8, 3 / 6)
    assert (found["rep_2"], found["rep_4"]) == pytest.approx((2 / 5 / 2, 0))
    found = repetition([BLOCK * 4, PROSE[:20], []])
    assert (found["loop_share"], found["tokens"]) == (20 / 40, 40)
    assert found["looping"] == pytest.approx(1 / 3)
    assert found["rep_2"] == pytest.approx((1 - 5 / 19) / 3)
    rest = [1 - found[f"rep_{n}"] for n in (2, 3, 4)]
    assert found["diversity"] == pytest.approx(rest[0] * rest[1] * rest[2])
    assert repetition([[*BLOCK * 4, 1, 2, 3, 6, 8]])["looping"] == 0
    assert repetition([[1, 2, 3, 6, 8, *BLOCK * 4]])["looping"] == 1
