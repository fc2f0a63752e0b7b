"""The text-to-SQL recipe against a hand-written stand-in for the SDK's clients: stages, staleness, stop and go on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker import types

from openrl_recipes.shared import client
from openrl_recipes.shared.folder import Record, read_lines
from openrl_recipes.shared.options import OptionError, parse
from openrl_recipes.shared.report import write_report
from openrl_recipes.text_to_sql import run, train
from openrl_recipes.text_to_sql.evaluate import accuracies
from openrl_recipes.text_to_sql.item import Item
from openrl_recipes.text_to_sql.options import Options
from openrl_recipes.text_to_sql.sandbox import QueryError
from openrl_recipes.text_to_sql.scoring import Reference, Score
from openrl_recipes.text_to_sql.sources import open_source

MODEL = "a/model"


def values(datum: types.Datum, key: str) -> list[float]:
    return datum.loss_fn_inputs[key].to_numpy().tolist()


# ---- a stand-in for the SDK: a model that writes right queries with a skill that grows a step ----


class Characters:
    """A tokenizer whose tokens are characters; texts open with token 1."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(letter) for letter in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))


class Stopped(Exception):
    """Stands for the SIGKILL: comes out of whatever the recipe was just calling."""


@dataclass
class Server:
    """What outlives a killed client: checkpoints. `calls` tells what it was asked, `stop_at` when to break off."""

    answers: dict[str, str]
    saved: dict[str, int] = field(default_factory=dict[str, int])
    calls: list[str] = field(default_factory=list[str])
    batches: list[list[types.Datum]] = field(default_factory=list[list[types.Datum]])
    runs: int = 0
    stop_at: int = -1
    unanimous: bool = False

    def called(self, call: str) -> None:
        if len(self.calls) == self.stop_at:
            raise Stopped
        self.calls.append(call)


@dataclass
class Ready:
    """A future that has its result already."""

    value: Any

    def result(self) -> Any:
        return self.value


@dataclass
class FakePolicy:
    """The weights after `steps` updates. Which of its samples are right depends on the seed, as with a real one."""

    server: Server
    steps: int

    def sample(self, prompt: types.ModelInput, num_samples: int, params: types.SamplingParams) -> Ready:
        assert params.stop == ["\n"]
        tokens = prompt.to_ints()
        assert tokens[0] == 1
        right = self.server.answers[Characters().decode(tokens[1:])]
        if params.temperature == 0:
            self.server.called(f"greedy {self.steps}")
            texts = [right if hash_of(right) < self.steps / 10 else " nonsense\n"]
        else:
            self.server.called(f"sample {self.steps}")
            draws = np.random.default_rng(params.seed).random(num_samples)
            skill = 2.0 if self.server.unanimous else 0.3 + self.steps / 20
            texts = [right if draw < skill else " nonsense\n" for draw in draws]
        return Ready(types.SampleResponse(sequences=[sequence(text) for text in texts]))


def hash_of(text: str) -> float:
    return sum(map(ord, text)) % 100 / 100


def sequence(text: str) -> types.SampledSequence:
    tokens = np.array([ord(letter) for letter in text], dtype=np.int32)
    logprobs = np.full(len(tokens), -0.5, dtype=np.float32)
    return types.SampledSequence(stop_reason="stop", sequence_id="s", tokens_np=tokens, logprobs_np=logprobs)


@dataclass
class FakeTrainer:
    """Becomes better with each step; a checkpoint holds how many there were."""

    server: Server
    name: str
    steps: int = 0

    def get_tokenizer(self) -> Characters:
        return Characters()

    def forward(self, data: list[types.Datum], loss_fn: str) -> Ready:
        return self._pass(data)

    def forward_backward(self, data: list[types.Datum], loss_fn: str) -> Ready:
        self.server.called(loss_fn)
        self.server.batches.append(data)
        return self._pass(data)

    def optim_step(self, params: types.AdamParams) -> Ready:
        self.server.called("optim")
        self.steps += 1
        return Ready(None)

    def save_weights_and_get_sampling_client(self) -> Ready:
        return Ready(FakePolicy(self.server, self.steps))

    def save_state(self, name: str) -> Ready:
        return self._save("weights", name)

    def save_weights_for_sampler(self, name: str) -> Ready:
        return self._save("sampler_weights", name)

    def _save(self, kind: str, name: str) -> Ready:
        self.server.called(f"save {name}")
        path = f"tinker://{self.name}/{kind}/{name}"
        assert path not in self.server.saved
        self.server.saved[path] = self.steps
        return Ready(types.SaveWeightsResponse(path=path))

    def _pass(self, data: list[types.Datum]) -> Ready:
        rows = [values(datum, "target_tokens") for datum in data]
        outputs = [{"logprobs": types.TensorData.from_numpy(np.full(len(r), -0.25, np.float32))} for r in rows]
        metrics = {"loss:sum": 1.5 - self.steps / 100 + len(data) / 1000}
        return Ready(types.ForwardBackwardOutput("ArrayRecord", outputs, metrics))


@dataclass
class FakeService:
    server: Server

    def __enter__(self) -> FakeService:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def get_server_capabilities(self) -> types.GetServerCapabilitiesResponse:
        return types.GetServerCapabilitiesResponse(supported_models=[types.SupportedModel(model_name=MODEL)])

    def create_lora_training_client(self, model: str, rank: int, seed: int) -> Ready:
        return Ready(self._trainer(0))

    def create_training_client_from_state_with_optimizer(self, path: str) -> Ready:
        return Ready(self._trainer(self.server.saved[path]))

    def _trainer(self, steps: int) -> FakeTrainer:
        self.server.runs += 1
        return FakeTrainer(self.server, f"run-{self.server.runs}", steps)


@dataclass
class FakeRest:
    server: Server

    def delete_checkpoint_from_tinker_path(self, path: str) -> Ready:
        del self.server.saved[path]
        return Ready(None)

    def get_server_capabilities(self) -> Ready:
        return Ready(FakeService(self.server).get_server_capabilities())


class PlainJudge:
    """Scores in this process: what the real one adds is tested with it."""

    def __enter__(self) -> PlainJudge:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def score(self, pairs: Sequence[tuple[Item, str]]) -> list[Score]:
        return [score(item, query) for item, query in pairs]

    def submit(self, pairs: Sequence[tuple[Item, str]]) -> Future[list[Score]]:
        done: Future[list[Score]] = Future()
        done.set_result(self.score(pairs))
        return done


def score(item: Item, query: str) -> Score:
    try:
        with Reference(item.gold, item.databases) as reference:
            return reference.score(query)
    except QueryError as error:
        return Score(error=str(error))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    source = open_source("generated", 0)
    drawn = [*source.held_out(12), *islice(source.train(0), 40), *islice(source.train(1), 40)]
    fake = Server({item.prompt: item.answer for item in drawn})
    monkeypatch.setattr(client.tinker, "ServiceClient", lambda: FakeService(fake))
    monkeypatch.setattr(run.tinker, "RestClient", lambda: FakeRest(fake))
    monkeypatch.setattr(train, "Judge", PlainJudge)
    monkeypatch.setattr(train, "write_report", lambda folder: None)  # slow; one test has it back
    return fake


SMALL = Options(
    model=MODEL,
    eval_items=12,
    sft_steps=4,
    sft_batch=4,
    rl_steps=5,
    rl_groups=2,
    rl_samples=4,
    eval_every=2,
    save_every=2,
    max_staleness=0,
)


def small(out: Path, **other: Any) -> Options:
    return replace(SMALL, out=str(out), **other)


def records(out: Path) -> list[Record]:
    """What was measured, without the times."""
    timeless = [{k: v for k, v in r.items() if k not in ("at", "seconds")} for r in read_lines(out / "metrics.jsonl")]
    return [record for record in timeless if "sampled_tokens" not in record or "held_out" in record]


# ---- options ----


def test_every_option_has_a_flag_and_stages_and_losses_are_checked() -> None:
    assert parse(Options, []) == Options()
    got = parse(
        Options, ["--rl-steps", "3", "--rl-loss", "gspo", "--stages", "grpo", "--no-keep-best", "--runs", "0.1"]
    )
    assert got == Options(rl_steps=3, rl_loss="gspo", stages="grpo", keep_best=False, runs=0.1)
    assert (got.weights.match, got.weights.runs, got.weights.parses) == (1.0, 0.1, 0.0)
    with pytest.raises(Exception, match="dro"):
        parse(Options, ["--rl-loss", "dro"])


@pytest.mark.parametrize(("name", "value"), [("rl_samples", 1), ("max_staleness", -1), ("eval_items", 0)])
def test_options_that_cannot_work_are_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(OptionError, match=f"--{name.replace('_', '-')} {value}: at least"):
        replace(Options(), **{name: value})


# ---- the stages ----


def test_both_stages_run_and_every_evaluation_is_on_the_same_unseen_questions(server: Server, tmp_path: Path) -> None:
    summary = train.main(small(tmp_path))
    measured = records(tmp_path)
    stages = [(r["stage"], r["step"]) for r in measured if "held_out" in r]
    assert stages == [("before", 0), ("after sft", 4), ("evaluate", 2), ("evaluate", 4), ("after", 5)]
    scores = [r["held_out"] for r in measured if "held_out" in r]
    assert scores == sorted(scores)
    assert scores[0] == 0.0 < scores[1] < scores[-1]
    assert summary.accuracy == {"before": scores[0], "after sft": scores[1], "evaluate": scores[3], "after": scores[4]}
    assert [r["step"] for r in measured if "loss" in r] == [1, 2, 3, 4]
    after = next(r for r in measured if r["stage"] == "after")
    assert after["kl_v2"] == pytest.approx(0.25**2 / 2)
    samples = read_lines(tmp_path / "samples.jsonl")
    assert {s["stage"] for s in samples} == {"before", "after sft", "after"}
    assert len({s["prompt"] for s in samples}) == 12


def test_the_report_is_written_and_the_end_says_where_the_weights_are(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "write_report", write_report)
    summary = train.main(small(tmp_path))
    assert "after sft" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert str(summary.state) in printed
    assert f"{summary.best.path} ({summary.best.score:.1%}, chosen by that held-out score)" in printed


def test_the_supervised_loss_is_a_mean_over_the_tokens_of_the_reference(server: Server, tmp_path: Path) -> None:
    train.main(small(tmp_path, stages="sft"))
    assert [r["stage"] for r in records(tmp_path) if "held_out" in r] == ["before", "after"]
    assert "importance_sampling" not in server.calls
    data = server.batches[0]
    assert sum(weight for datum in data for weight in values(datum, "weights")) == pytest.approx(1)
    pairs = zip(values(data[0], "target_tokens"), values(data[0], "weights"), strict=True)
    assert Characters().decode([int(token) for token, weight in pairs if weight > 0]) in server.answers.values()


def test_grpo_alone_starts_from_the_base_model(server: Server, tmp_path: Path) -> None:
    train.main(small(tmp_path, stages="grpo"))
    assert "cross_entropy" not in server.calls
    assert [r["stage"] for r in records(tmp_path) if "held_out" in r] == ["before", "evaluate", "evaluate", "after"]


def test_a_step_logs_reward_of_all_rollouts_and_what_to_watch(server: Server, tmp_path: Path) -> None:
    train.main(small(tmp_path))
    steps = [r for r in records(tmp_path) if r["stage"] == "grpo"]
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5]
    for record in steps:
        assert record["reward"] == record["match"]
        assert {"parses", "runs", "columns", "values", "mixed_groups", "entropy", "kl_v1"} <= set(record)
        assert record["kl_v1"] == pytest.approx(-0.25)  # the sampler says -0.5, the trainer -0.25
        assert record["kl_v2"] == pytest.approx(0.25**2 / 2)


def test_groups_that_agree_are_neither_trained_on_nor_left_out_of_the_reward(server: Server, tmp_path: Path) -> None:
    server.unanimous = True
    train.main(small(tmp_path, stages="grpo"))
    assert "optim" not in server.calls
    steps = [r for r in records(tmp_path) if r["stage"] == "grpo"]
    assert [(r["reward"], r["mixed_groups"]) for r in steps] == [(1.0, 0.0)] * 5


def test_only_mixed_groups_are_sent_with_centred_advantages(server: Server, tmp_path: Path) -> None:
    train.main(small(tmp_path, stages="grpo", rl_groups=6))
    shares = [r["mixed_groups"] for r in records(tmp_path) if r["stage"] == "grpo"]
    assert [len(batch) for batch in server.batches] == [round(share * 6) * 4 for share in shares if share]
    for batch in server.batches:
        for group in (batch[i : i + 4] for i in range(0, len(batch), 4)):
            advantage = [max(values(d, "advantages"), key=abs) * tokens_of(batch) for d in group]
            assert sum(advantage) == pytest.approx(0, abs=1e-4)
            assert max(advantage) > 0


def tokens_of(batch: Sequence[types.Datum]) -> int:
    return sum(sum(1 for value in values(datum, "logprobs") if value) for datum in batch)


def test_a_shaped_reward_is_logged_apart_from_the_match(server: Server, tmp_path: Path) -> None:
    train.main(small(tmp_path, stages="grpo", match=2.0, parses=0.5))
    for record in (r for r in records(tmp_path) if r["stage"] == "grpo"):
        assert record["reward"] == pytest.approx(2 * record["match"] + 0.5 * record["parses"])


def test_gspo_gets_the_mask_that_it_asks_for_and_others_do_not(server: Server, tmp_path: Path) -> None:
    train.main(small(tmp_path / "a", stages="grpo", rl_loss="gspo"))
    assert "gspo" in server.calls
    for datum in server.batches[0]:
        assert values(datum, "sequence_ratio_mask") == [float(bool(lp)) for lp in values(datum, "logprobs")]
    train.main(small(tmp_path / "b", stages="grpo", rl_loss="ppo"))
    assert "sequence_ratio_mask" not in server.batches[-1][0].loss_fn_inputs


def test_accuracy_is_given_by_level() -> None:
    drawn = open_source("generated", 0).held_out(3)
    items = [replace(item, level=level) for item, level in zip(drawn, (1, 3, 3), strict=True)]
    assert accuracies(items, [True, False, True]) == {
        "held_out": pytest.approx(2 / 3),
        "held_out_level_1": 1.0,
        "held_out_level_3": 0.5,
    }


# ---- staleness ----


@pytest.mark.parametrize(
    ("staleness", "save_every", "expected"),
    [
        (0, 0, [0, 1, 2, 3, 4]),
        (1, 0, [0, 0, 1, 2, 3]),
        (2, 0, [0, 0, 0, 1, 2]),
        (1, 2, [0, 0, 2, 2, 4]),  # at a point the next batch waits for its weights
        (3, 2, [0, 0, 2, 2, 4]),
    ],
)
def test_a_batch_comes_from_the_weights_of_a_fixed_number_of_steps_ago(
    server: Server, tmp_path: Path, staleness: int, save_every: int, expected: list[int]
) -> None:
    options = small(tmp_path, stages="grpo", rl_groups=6, eval_every=0, max_staleness=staleness, save_every=save_every)
    train.main(options)
    sampled = [int(call.split()[1]) for call in server.calls if call.startswith("sample")]
    assert server.calls.count("optim") == 5, "every step must train, or steps do not count weights"
    assert sampled[: 5 * 6 : 6] == expected


def test_the_next_batch_is_on_its_way_before_a_step_trains(server: Server, tmp_path: Path) -> None:
    train.main(small(tmp_path / "on-policy", stages="grpo", save_every=0))
    assert sampled_before_first_update(server) == 2  # a batch of two questions
    server.calls.clear()
    train.main(small(tmp_path / "stale", stages="grpo", save_every=0, max_staleness=1))
    assert sampled_before_first_update(server) == 4


def sampled_before_first_update(server: Server) -> int:
    begun = server.calls[: server.calls.index("importance_sampling")]
    return sum(call.startswith("sample") for call in begun)


# ---- checkpoints, stop and go on ----


def test_the_best_weights_are_kept_and_nothing_that_no_run_needs(server: Server, tmp_path: Path) -> None:
    summary = train.main(small(tmp_path))
    scores = {(r["stage"], r["step"]): r["held_out"] for r in records(tmp_path) if "held_out" in r}
    assert summary.best.score == max(scores.values())
    assert summary.best.path is not None
    assert set(server.saved) == {summary.best.path, summary.state}
    assert server.saved[str(summary.state)] == 9
    assert summary.best.stage == "grpo"
    assert server.saved[summary.best.path] == 4 + summary.best.step


def test_without_keep_best_only_the_last_state_stays(server: Server, tmp_path: Path) -> None:
    summary = train.main(small(tmp_path, keep_best=False))
    assert summary.best.path is None
    assert set(server.saved) == {summary.state}


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_stopped_anywhere_and_run_again_measures_what_an_unbroken_one_does(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    monkeypatch.setattr(train, "show_results", lambda run, console: None)
    unbroken = train.main(small(tmp_path / "unbroken", max_staleness=staleness))
    calls = len(server.calls)
    for stop in range(1 + staleness, calls, 7):
        out = tmp_path / str(stop)
        server.stop_at = len(server.calls) + stop
        with pytest.raises(Stopped):
            train.main(small(out, max_staleness=staleness))
        server.stop_at = -1
        resumed = train.main(small(out, max_staleness=staleness))
        assert records(out) == records(tmp_path / "unbroken"), f"stopped at call {stop} of {calls}"
        assert (resumed.accuracy, resumed.best.score) == (unbroken.accuracy, unbroken.best.score)
        samples = [json.dumps(s) for s in read_lines(out / "samples.jsonl")]
        assert samples == [json.dumps(s) for s in read_lines(tmp_path / "unbroken" / "samples.jsonl")]


def test_a_finished_run_is_not_run_again(server: Server, tmp_path: Path) -> None:
    first = train.main(small(tmp_path))
    server.calls.clear()
    assert train.main(small(tmp_path)) == first
    assert server.calls == []


def test_a_folder_with_another_run_is_refused(server: Server, tmp_path: Path) -> None:
    train.main(small(tmp_path, stages="sft"))
    with pytest.raises(OptionError, match="sft_steps=4"):
        train.main(small(tmp_path, stages="sft", sft_steps=9))
