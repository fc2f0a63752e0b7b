"""The DPO loss against values worked out by hand from the formula (arXiv:2305.18290), and the pairs it learns from."""

from __future__ import annotations

import math

import pytest
import torch
from tinker import types

from openrl_recipes.dpo.chat import Chat
from openrl_recipes.dpo.loss import answer_logprobs, chosen_nll, dpo_loss, measures
from openrl_recipes.dpo.preferences import is_brief, is_correct, pairs
from openrl_recipes.shared.client import shifted
from openrl_recipes.shared.options import OptionError

# ---- the loss ----

POLICY = torch.tensor([[-10.0, -9.0], [-4.0, -20.0]])  # chosen, rejected
REFERENCE = torch.tensor([[-12.0, -8.0], [-3.0, -25.0]])


def test_the_loss_is_that_of_the_formula() -> None:
    """Pair 1: .1 * (2 - -1) = .3; pair 2: .1 * (-1 - 5) = -.6. -log sigmoid: .554355 and 1.037488; their mean."""
    wanted = (0.5543552444685272 + 1.0374879504858856) / 2
    assert float(dpo_loss(POLICY, REFERENCE, 0.1)) == pytest.approx(wanted, rel=1e-6)


def test_the_gradient_is_that_of_the_formula() -> None:
    """d loss / d log p(chosen) = -beta * sigmoid(-margin) / pairs, and the opposite for the rejected answer."""
    policy = POLICY.clone().requires_grad_()
    dpo_loss(policy, REFERENCE, 0.1).backward()
    steep = [1 / (1 + math.exp(0.3)), 1 / (1 + math.exp(-0.6))]
    assert policy.grad is not None
    torch.testing.assert_close(policy.grad, torch.tensor([[-0.05 * s, 0.05 * s] for s in steep]))


def test_at_the_reference_the_loss_is_log_2_and_every_pair_a_tie() -> None:
    assert float(dpo_loss(POLICY, POLICY, 0.5)) == pytest.approx(math.log(2))
    assert measures(POLICY, POLICY, 0.5)["accuracy"] == 0.5


def test_a_hopeless_pair_has_a_finite_loss_and_a_full_gradient() -> None:
    policy = torch.tensor([[-5000.0, 0.0]], requires_grad=True)
    loss = dpo_loss(policy, torch.zeros(1, 2), 1.0)
    loss.backward()
    assert float(loss.detach()) == 5000
    assert policy.grad is not None
    assert policy.grad.tolist() == [[-1.0, 1.0]]


def test_measures() -> None:
    found = measures(POLICY, REFERENCE, 0.1)
    assert found["accuracy"] == 0.5
    assert found["reward_chosen"] == pytest.approx(0.05)
    assert found["reward_rejected"] == pytest.approx(0.2)
    assert found["reward_margin"] == pytest.approx(-0.15)


def test_logprobs_of_the_answers_alone_are_summed_and_paired() -> None:
    data = [shifted([1, 2, 3], answer, weights=[1.0] * len(answer)) for answer in ([4, 5], [6], [7], [8, 9])]
    rows = [torch.tensor(row) for row in ([-9.0, -9, -1, -2], [-9.0, -9, -4], [-9.0, -9, -8], [-9.0, -9, -16, -32])]
    assert answer_logprobs(data, rows).tolist() == [[-3, -4], [-8, -48]]


def test_the_chosen_answers_count_a_token_whatever_their_length() -> None:
    """Chosen answers of two tokens and of one: (10 / 2 + 4 / 1) / 2; the rejected ones do not count."""
    data = [shifted([1, 2, 3], answer, weights=[1.0] * len(answer)) for answer in ([4, 5], [6], [7], [8, 9, 9])]
    policy = POLICY.clone().requires_grad_()
    loss = chosen_nll(policy, data)
    loss.backward()
    assert float(loss.detach()) == 4.5
    assert policy.grad is not None
    assert policy.grad.tolist() == [[-0.25, 0.0], [-0.5, 0.0]]


# ---- the pairs ----


def test_no_held_out_question_is_trained_on() -> None:
    train, held_out = pairs(128)
    assert len(held_out) == 128
    assert not {pair.question for pair in train} & {pair.question for pair in held_out}
    assert len({pair.question for pair in held_out}) > 40
    assert len(set(train)) == len(train) > 128


def test_both_answers_hold_the_fact_and_only_the_chosen_one_is_brief() -> None:
    train, held_out = pairs(128)
    for pair in [*train, *held_out]:
        assert is_brief(pair.chosen)
        assert not is_brief(pair.rejected)
        assert is_correct(pair.chosen, pair.chosen)
        assert is_correct(pair.rejected, pair.chosen)
        assert "{" not in pair.question + pair.rejected
        assert pair.rejected[0] in "IT" or pair.rejected[0].isupper()


def test_pairs_are_always_the_same() -> None:
    assert pairs(128) == pairs(128)
    assert pairs(16)[1] == pairs(128)[1][:16]


@pytest.mark.parametrize("count", [0, 10_000])
def test_there_must_be_as_many_pairs(count: int) -> None:
    with pytest.raises(OptionError, match=r"--eval-pairs"):
        pairs(count)


@pytest.mark.parametrize(
    ("answer", "brief", "correct"),
    [
        ("Lima", True, True),
        ("lima.", True, True),
        ('"Lima"', True, True),
        ("The capital of Peru is Lima.", False, True),
        ("Cusco", True, False),
        ("", False, False),
        ("Limassol", True, False),
        ("Peru", True, False),
    ],
)
def test_what_is_brief_and_what_is_correct(answer: str, brief: bool, correct: bool) -> None:
    assert (is_brief(answer), is_correct(answer, "Lima")) == (brief, correct)


# ---- the chat ----


class Letters:
    """A tokenizer whose tokens are letters."""

    chat_template = "yes"

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize
        told = "".join(f"[{m['role']}]{m['content']}[end]\n" for m in messages)
        return told + ("[assistant]" if add_generation_prompt else "")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(token) for token in tokens)


def test_an_answer_goes_with_what_ends_it_and_has_all_the_weight() -> None:
    chat = Chat(Letters())
    assert chat.end == "[end]"
    datum = chat.datum("Who?", "Me")
    prompt = "[system]Answer the question.[end]\n[user]Who?[end]\n[assistant]"
    whole = prompt + "Me[end]"
    assert isinstance(datum, types.Datum)
    assert datum.model_input.to_ints() == [ord(letter) for letter in whole[:-1]]
    assert datum.loss_fn_inputs["target_tokens"].tolist() == [ord(letter) for letter in whole[1:]]
    assert datum.loss_fn_inputs["weights"].tolist() == [0.0] * (len(prompt) - 1) + [1.0] * len("Me[end]")
    assert chat.decode([ord(letter) for letter in "Me[end]"]) == "Me"


def test_a_model_without_a_chat_template_is_refused() -> None:
    tokenizer = Letters()
    tokenizer.chat_template = ""
    with pytest.raises(OptionError, match="chat template"):
        Chat(tokenizer)
