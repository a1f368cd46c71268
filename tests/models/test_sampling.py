"""Continuations side by side. Oracles: argmax, softmax frequencies, Transformers' generate."""

import pytest
import torch

from dotmoe.models.sampling import Sampling, continuations

FAMILIES = ("llama", "qwen2", "gemma3_text", "granite", "mistral")
PROMPTS = [[40, 41, 42], [99, 98, 97, 96, 95, 94, 93], [50], [60, 61], [70, 71, 72, 73]]


@torch.no_grad()
def argmaxed(model, prompt, new_tokens, ends):
    ids = list(prompt)
    for _ in range(new_tokens):
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in ends:
            break
    return ids[len(prompt) :]


def by_number(made):
    return [each.ids for each in sorted(made)]


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_all_lengths_continue_as_each_does_alone(dense_of, family):
    model = dense_of(family).model
    alone = [argmaxed(model, prompt, 12, ()) for prompt in PROMPTS]
    greedy = Sampling(temperature=0.0, new_tokens=12, rows=3)
    assert by_number(continuations(model, PROMPTS, greedy, ())) == alone


@pytest.mark.parametrize("family", FAMILIES)
def test_a_penalty_on_repetition_is_that_of_transformers(dense_of, family):
    model = dense_of(family).model
    free = {number: argmaxed(model, prompt, 12, ()) for number, prompt in enumerate(PROMPTS)}
    expected = []
    for prompt in PROMPTS:
        made = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
            repetition_penalty=1.3,
        )
        expected.append(made[0, len(prompt) :].tolist())
    how = Sampling(temperature=0.0, new_tokens=12, rows=3, repetition_penalty=1.3)
    assert by_number(continuations(model, PROMPTS, how, ())) == expected
    assert expected != [*free.values()], "the penalty must matter here"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_draws_are_the_same_whatever_dtype_a_program_has_made_the_default(dtype, dense):
    how, before = Sampling(new_tokens=12), torch.get_default_dtype()
    expected = by_number(continuations(dense.model, PROMPTS, how, ()))
    torch.set_default_dtype(dtype)
    try:
        assert by_number(continuations(dense.model, PROMPTS, how, ())) == expected
    finally:
        torch.set_default_dtype(before)


def test_a_penalty_follows_the_rows_that_stay(dense):
    how = Sampling(temperature=0.0, new_tokens=12, repetition_penalty=1.3)
    free = by_number(continuations(dense.model, PROMPTS, how, ()))
    ends = {free[1][2], free[3][5]}
    made = by_number(continuations(dense.model, PROMPTS, how, ends))
    for ids, whole in zip(made, free, strict=True):
        first_end = next((place for place, token in enumerate(whole) if token in ends), 11)
        assert ids == whole[: first_end + 1]


def test_a_row_that_ends_leaves_and_changes_no_other(dense):
    free = [argmaxed(dense.model, prompt, 12, ()) for prompt in PROMPTS]
    ends = {free[1][2], free[3][5]}
    made = list(continuations(dense.model, PROMPTS, Sampling(temperature=0.0, new_tokens=12), ends))
    alone = [argmaxed(dense.model, prompt, 12, ends) for prompt in PROMPTS]
    assert by_number(made) == alone
    assert [each.is_finished for each in sorted(made)] == [ids[-1] in ends for ids in alone]


def test_samples_follow_the_tempered_softmax_of_the_top_k(dense):
    prompt, number = PROMPTS[1], 2000
    how = Sampling(temperature=1.5, top_k=8, new_tokens=1, rows=500)
    drawn = torch.tensor(by_number(continuations(dense.model, [prompt] * number, how, ())))
    with torch.no_grad():
        logits_V = dense.model(input_ids=torch.tensor([prompt])).logits[0, -1]
    top_K, token_K = logits_V.topk(8)
    expected_K = (top_K / 1.5).softmax(0)
    found_K = (drawn == token_K).sum(0) / number
    error_K = (expected_K * (1 - expected_K) / number).sqrt()
    assert float(found_K.sum()) == 1
    assert ((found_K - expected_K).abs() < 5 * error_K).all()


def test_what_is_drawn_depends_on_seed_and_place_alone(dense):
    how = Sampling(new_tokens=6, rows=5)
    whole = by_number(continuations(dense.model, PROMPTS, how, (), seed=3))
    narrow = Sampling(new_tokens=6, rows=2)
    assert by_number(continuations(dense.model, PROMPTS, narrow, (), seed=3)) == whole
    assert by_number(continuations(dense.model, PROMPTS, how, (), seed=4)) != whole
