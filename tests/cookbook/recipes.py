"""The cookbook's recipes: how those that run offline are started, what the others would need."""

from __future__ import annotations

from dataclasses import dataclass

_RECIPES = "tinker_cookbook.recipes."
_IS = "loss_fn=importance_sampling"
_RL = ("groups_per_batch=4", "group_size=2", "max_steps=2")
_SMALL = ("batch_size=4", "group_size=2", "max_steps=2")


@dataclass(frozen=True)
class Recipe:
    """One command. `{folder}` in an argument is where model and data lie; `fails_with` is what a refusal must say."""

    name: str
    arguments: tuple[str, ...]
    needs: str
    module: str = ""  # default: `tinker_cookbook.recipes.` and the name's first word
    stdin: str = ""
    fails_with: str = ""
    timeout: float = 900.0

    @property
    def command(self) -> tuple[str, ...]:
        return ("-m", self.module or _RECIPES + self.name.split()[0], *self.arguments)


@dataclass(frozen=True)
class Absent:
    """A recipe that is not run, and why not."""

    name: str
    why: str


def _math(env: str, needs: str) -> Recipe:
    return Recipe(f"math_rl.train env={env}", (f"env={env}", *_RL, "max_tokens=16", _IS), needs)


RECIPES: tuple[Recipe, ...] = (
    Recipe(
        "math_rl.train (as it is)",
        ("model_name=Qwen/Qwen3.5-4B", *_RL),
        "`loss_fn=importance_sampling`: its default, `stable_reinforce`, is refused",
        fails_with='Use loss_fn="importance_sampling"',
    ),
    Recipe("math_rl.train", ("model_name=Qwen/Qwen3.5-4B", *_RL, _IS), "nothing (arithmetic is generated)"),
    Recipe(
        "math_rl.train off-policy",
        ("model_name=Qwen/Qwen3.5-4B", *_RL, "max_steps_off_policy=2", _IS),
        "nothing",
    ),
    _math("gsm8k", "`openai/gsm8k`"),
    _math("math", "`EleutherAI/hendrycks_math`, `HuggingFaceH4/MATH-500`"),
    _math("polaris", "`POLARIS-Project/Polaris-Dataset-53K`"),
    _math("deepmath", "`zwhe99/DeepMath-103K`"),
    Recipe("multiplayer_rl.guess_number.train", (*_SMALL, "max_tokens=16", "eval_every=0"), "nothing"),
    Recipe(
        "multiplayer_rl.text_arena.train",
        ("batch_size=4", "num_train_datapoints=16", "num_test_datapoints=4", "max_tokens=16", "max_steps=2"),
        "`textarena`",
    ),
    Recipe(
        "multiplayer_rl.twenty_questions.train",
        ("batch_size=2", "group_size=2", "num_epochs=1", "max_tokens=8", "max_steps=1", "eval_every=0"),
        "an answerer under the name `Qwen/Qwen3.5-9B`",
    ),
    Recipe("preference.shorter.train", (*_SMALL, "max_tokens=16"), "nothing"),
    Recipe(
        "preference.dpo.train",
        ("batch_size=4", "max_steps=2"),
        "`Anthropic/hh-rlhf`; `forward_backward_custom`",
    ),
    Recipe(
        "preference.rlhf.rlhf_pipeline",
        ("short_name=stand-in", "batch_size=8", "lora_rank=8", "rl_max_tokens=16", "rl_group_size=2", "max_steps=1"),
        "`HuggingFaceH4/no_robots`, `Anthropic/hh-rlhf`",
    ),
    Recipe(
        "chat_sl.train dataset=FILE",
        ("dataset={folder}/conversations.jsonl", "batch_size=8", "max_steps=2", "model_name=Qwen/Qwen3.5-4B"),
        "a file of conversations",
    ),
    Recipe("chat_sl.train", ("batch_size=16", "max_steps=2", "save_every=1"), "`HuggingFaceH4/no_robots`"),
    Recipe("chat_sl.train dataset=tulu3", ("dataset=tulu3", "batch_size=16", "max_steps=2"), "tulu-3-sft-mixture"),
    Recipe(
        "prompt_distillation.train",
        ("file_path={folder}/conversations.jsonl", "batch_size=16", "max_steps=2"),
        "a file of conversations; `create_data` asks `Qwen/Qwen3.6-35B-A3B` for it",
    ),
    Recipe(
        "rubric.train",
        (
            "model_name=Qwen/Qwen3.5-4B",
            "groups_per_batch=2",
            "train_group_size=2",
            "max_tokens=8",
            "max_steps=2",
            "eval_every=0",
            "train_jsonl_path={folder}/rubric/example_rubric_train.jsonl",
            "test_jsonl_path={folder}/rubric/example_rubric_test.jsonl",
            _IS,
        ),
        "`rubric.generate_data`; a grader under the name `Qwen/Qwen3.6-35B-A3B`",
    ),
    Recipe(
        "decisions.demo",
        ("--model_name=Qwen/Qwen3.5-4B",),
        "top-k logprobs; a question on stdin",
        stdin="How do I pick a learning rate?\n\n",
    ),
    Recipe("sl_loop", ("batch_size=8", "max_steps=2"), "`HuggingFaceH4/no_robots`"),
    Recipe("sl_basic", ("max_steps=2",), "`HuggingFaceH4/no_robots`; its batch of 128 is fixed"),
    Recipe("rl_loop", ("batch_size=4", "group_size=2", "max_tokens=16", "max_steps=2", _IS), "`openai/gsm8k`"),
    Recipe(
        "rl_basic",
        ("max_tokens=4", "max_steps=1"),
        "`openai/gsm8k`; its 128 groups of 16 are fixed",
    ),
    Recipe(
        "distillation.on_policy_distillation",
        ("groups_per_batch=4", "group_size=2", "max_tokens=16", "max_steps=2", "lora_rank=8"),
        "DeepMath-103K; a teacher under the name `Qwen/Qwen3.5-9B`",
    ),
    Recipe(
        "distillation.on_policy_multi_teacher",
        (
            "deepmath_groups_per_batch=2",
            "tulu3_groups_per_batch=2",
            "group_size=2",
            "max_tokens=16",
            "max_steps=1",
            "lora_rank=8",
            "deepmath_teacher_model=Qwen/Qwen3.5-9B",
            "tulu3_teacher_model=Qwen/Qwen3.5-4B",
        ),
        "DeepMath-103K, tulu-3-sft-mixture; two teachers",
    ),
    Recipe(
        "distillation.off_policy_reasoning",
        ("batch_size=8", "max_prompts=64", "buffer_size=64", "max_steps=2", "lora_rank=8"),
        "`open-thoughts/OpenThoughts3-1.2M` (streamed)",
    ),
    Recipe(
        "sdft.train",
        ("groups_per_batch=4", "max_tokens=16", "max_steps=2", "lora_rank=8", "topk=4", "eval_every=0"),
        "`hicai-zju/SciKnowEval`; top-k prompt logprobs, targets of rank 2; its evaluation is broken upstream",
    ),
    Recipe(
        "sdft.train dataset=toolalpaca",
        (
            "dataset=toolalpaca",
            "groups_per_batch=4",
            "max_tokens=16",
            "max_steps=2",
            "lora_rank=8",
            "topk=4",
            "eval_every=0",
        ),
        "`tangqiaoyu/ToolAlpaca`",
    ),
)

ABSENT: tuple[Absent, ...] = (
    Absent("forecasting.train", "questions of its own hub data set, Qwen3.8-27B"),
    Absent("rl_numerics_check.train", "episodes of 60,000 tokens; wikitext-103 from a hub"),
    Absent("true_thinking_score", "an analysis of a model that reasons; nothing to train"),
    Absent("prompt_distillation.create_data", "a model that can tell languages apart; it keeps only real answers"),
    Absent("chat_sl.sweep", "many runs of `chat_sl.train`, which runs; its analysis reads Weights & Biases"),
    Absent("code_rl", "a sandbox service that runs programs"),
    Absent("harbor_rl, distillation.*harbor*", "an account at Modal, and tasks from its hub"),
    Absent("search_tool", "a Chroma server and embeddings of Gemini"),
    Absent("verifiers_rl", "environments of Prime Intellect's own hub"),
    Absent("vlm_classifier", "a vision model; images are answered with a clear 400"),
    Absent("audio.*", "a speech model; audio is answered with a clear 400"),
)

VALIDATE = Recipe(
    "tests.validate_temperature_logprobs",
    ("base_model=Qwen/Qwen3.5-4B",),
    "nothing",
    module="tests.validate_temperature_logprobs",
)

TESTS: tuple[str, ...] = (
    "test_recipe_math_rl.py::test_math_rl_sync",
    "test_recipe_math_rl.py::test_math_rl_async",
    "test_recipe_math_rl.py::test_math_rl_stream_minibatch",
    "test_recipe_chat_sl.py::test_chat_sl",
    "test_recipe_chat_sl.py::test_chat_sl_resume",
    "test_recipe_shorter.py::test_shorter",
    "test_recipe_rolling_checkpoints.py::test_rolling_checkpoint_train",
    "test_recipe_rolling_checkpoints.py::test_rolling_checkpoint_resume",
    "test_recipe_text_arena.py::test_text_arena",
    "test_recipe_text_arena.py::test_text_arena_random_opponent",
)
