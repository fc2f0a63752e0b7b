"""Runs vLLM for a sampler of openrl, under the interpreter that has vLLM: this file imports nothing of openrl.

Started as a script. Frames go over stdin and stdout: four bytes of length, most significant first, then JSON. The first
frame in says what to open (`openrl.backends.vllm.plan.Opening`); then come

    {"op": "adapter", "id", "name", "folder"}      load an adapter; ids and names are never used twice
    {"op": "forget", "id"}                         unload it
    {"op": "draw", "key", "prompt", "adapter", "seed", "temperature", "top_p", "top_k", "max_tokens", "stop", "top",
     "stream"}                                     draw one sequence; `stop` are token ids, `stream`: tell every token
    {"op": "cancel", "keys"}                       give sequences up

and frames out are

    {"op": "ready", "vllm", "can", "kv_tokens"}    or {"op": "unusable", "error"}, after which it ends
    {"op": "adapter", "id", "error"}               the adapter cannot be loaded
    {"op": "drawn", "parts": [[key, tokens, logprobs, tops, ended], ...], "steps", "seconds"}
    {"op": "failed", "key", "error"}               this sequence cannot be drawn
    {"op": "alive", "steps", "seconds"}            a sign of life of the thread that computes

`steps` and `seconds` are those of the engine since the last frame that had them.

It ends when its stdin does: the worker that started it is gone.
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
import json
import math
import os
import queue
import signal
import struct
import sys
import threading
import time
import traceback
from typing import Any, BinaryIO

_LENGTH = struct.Struct(">I")
_ALIVE_SECONDS = 0.25  # between signs of life while it computes
_IDLE_SECONDS = 1.0  # and while it waits
# vLLM makes no room for an adapter of a larger head; leaving the head out lets the other layers' adapters be used.
_LARGEST_HEAD = 258048
_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_PROBE_ID = 1  # the number of the adapter that the probe loads; openrl's own begin after it

Frame = dict[str, Any]


class Link:
    """Frames over two pipes. Only one thread may send."""

    def __init__(self, inlet: BinaryIO, outlet: BinaryIO) -> None:
        self._inlet = inlet
        self._outlet = outlet

    def receive(self) -> Frame | None:
        """The next frame; None at the end."""
        head = self._inlet.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack(head)
        body = self._inlet.read(size)
        return json.loads(body) if len(body) == size else None

    def send(self, frame: Frame) -> None:
        body = json.dumps(frame).encode()
        self._outlet.write(_LENGTH.pack(len(body)) + body)
        self._outlet.flush()


class Engine:
    """vLLM's engine, in this process, with the sampler taught to report logprobs before top-k and top-p."""

    def __init__(self, opening: Frame) -> None:
        _set_environment(opening)
        self.vllm: Any = importlib.import_module("vllm")
        kinds: Any = importlib.import_module("vllm.sampling_params")
        self._output_kind = kinds.RequestOutputKind
        self._request: Any = importlib.import_module("vllm.lora.request").LoRARequest
        report_before_truncation()
        arguments: Any = importlib.import_module("vllm.engine.arg_utils").EngineArgs(**_arguments(opening))
        engine: Any = importlib.import_module("vllm.v1.engine.llm_engine").LLMEngine
        self._engine = engine.from_engine_args(arguments)
        self._adapters: dict[int, Any] = {}
        self._top: dict[str, int] = {}  # of the sequences under way: how many most likely tokens are asked for

    @property
    def busy(self) -> bool:
        return self._engine.has_unfinished_requests()

    @property
    def kv_tokens(self) -> int:
        """What the KV cache holds; 0 where vLLM does not say."""
        cache = self._engine.vllm_config.cache_config
        return int((cache.num_gpu_blocks or 0) * cache.block_size)

    def load(self, number: int, name: str, folder: str) -> None:
        """Load an adapter. Raises whatever vLLM does if it cannot."""
        request = self._request(name, number, folder)
        self._engine.add_lora(request)
        self._adapters[number] = request

    def forget(self, number: int) -> None:
        if self._adapters.pop(number, None) is not None:
            self._engine.remove_lora(number)

    def draw(self, job: Frame) -> None:
        """Begin a sequence. Raises ValueError, or whatever vLLM does, if it cannot be drawn."""
        number = job["adapter"]
        if number is not None and number not in self._adapters:
            raise ValueError("its adapter could not be loaded")
        kinds = self._output_kind
        params = self.vllm.SamplingParams(
            temperature=job["temperature"],
            top_p=job["top_p"],
            top_k=job["top_k"],
            seed=job["seed"],
            max_tokens=job["max_tokens"],
            ignore_eos=True,  # openrl's stop rules decide; `stop` are those that are plain token ids
            stop_token_ids=job["stop"],
            detokenize=False,
            logprobs=job["top"],
            flat_logprobs=True,
            output_kind=kinds.DELTA if job["stream"] else kinds.FINAL_ONLY,
        )
        adapter = None if number is None else self._adapters[number]
        prompt = {"type": "token", "prompt_token_ids": job["prompt"]}
        self._engine.add_request(job["key"], prompt, params, lora_request=adapter)
        self._top[job["key"]] = job["top"]

    def cancel(self, keys: list[str]) -> None:
        known = [key for key in keys if self._top.pop(key, None) is not None]
        if known:
            self._engine.abort_request(known)

    def step(self) -> list[list[Any]]:
        """One step of all sequences; what they drew, as in the frame "drawn"."""
        parts: list[list[Any]] = []
        for output in self._engine.step():
            key = output.request_id
            if key not in self._top:
                continue
            drawn = output.outputs[0]
            logprobs, tops = read_logprobs(drawn.token_ids, drawn.logprobs, self._top[key])
            parts.append([key, list(drawn.token_ids), logprobs, tops, output.finished])
            if output.finished:
                del self._top[key]
        return parts

    def run(self, jobs: list[Frame]) -> dict[str, list[Any]]:
        """Draw sequences to their end; their parts by key."""
        for job in jobs:
            self.draw(job)
        found: dict[str, list[Any]] = {}
        while self.busy:
            found.update({part[0]: part for part in self.step()})
        return found


def read_logprobs(tokens: Any, logprobs: Any, top: int) -> tuple[list[float], list[list[list[Any]]]]:
    """The logprobs of drawn tokens, and for each the `top` most likely ids and logprobs, descending."""
    own: list[float] = []
    tops: list[list[list[Any]]] = []
    for token, cells in zip(tokens, logprobs, strict=True):
        own.append(cells[token].logprob)
        if top:
            best = sorted(((cell.logprob, -id_) for id_, cell in cells.items()), reverse=True)[:top]
            tops.append([[-id_ for _, id_ in best], [value for value, _ in best]])
    return own, tops


def report_before_truncation() -> None:
    """Make vLLM's "processed" logprobs those after temperature and before top-k and top-p, in whichever of its two
    samplers it runs. `Probe` finds out whether that worked."""
    samplers: Any = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler")
    first = samplers.TopKTopPSampler.__init__

    def begin(self: Any, *args: Any, **named: Any) -> None:
        first(self, *args, **named)
        cut = self.forward

        def forward(logits: Any, generators: Any, k: Any, p: Any) -> Any:
            whole = None
            if self.logprobs_mode == "processed_logprobs" and (k is not None or p is not None):
                whole = logits.log_softmax(dim=-1).float()  # before `cut`, which changes the logits in place
            drawn, logprobs = cut(logits, generators, k, p)
            return drawn, logprobs if whole is None else whole

        self.forward = forward

    samplers.TopKTopPSampler.__init__ = begin
    try:
        second: Any = importlib.import_module("vllm.v1.worker.gpu.sample.sampler").Sampler
        draw = second._sample_random
    except (ImportError, AttributeError):
        return  # a version with one sampler
    signature = inspect.signature(draw)
    if not {"processed_logits", "top_k", "top_p"} <= signature.parameters.keys():
        return  # a version whose second sampler is another one

    def draw_whole(*args: Any, **named: Any) -> Any:
        given = signature.bind(*args, **named).arguments
        whole = given["processed_logits"]
        if given["top_k"] is not None or given["top_p"] is not None:
            whole = whole.clone()  # `draw` changes the logits in place
        return draw(*args, **named)[0], whole

    second._sample_random = draw_whole


class Probe:
    """Finds out, by drawing, what this vLLM gets right with this model: openrl's own engine does the rest."""

    def __init__(self, engine: Engine, prompt: list[int], vocab: int) -> None:
        self._engine = engine
        self._prompt = prompt
        self._vocab = vocab

    def can(self, head: Frame) -> dict[str, bool]:
        """`temperature`: logprobs are those of the scaled logits (S1); `truncated`: also with top-k or top-p (S2);
        `head`: an adapter of the head is applied, `head` being one that leaves a choice of two tokens."""
        plain = self._table(1.0)
        scaled = [value / 2 for value in plain]
        total = max(scaled) + math.log(sum(math.exp(value - max(scaled)) for value in scaled))
        wanted = [value - total for value in scaled]
        free = self._one(temperature=2.0, top_p=1.0, top_k=0)
        cut = self._one(temperature=2.0, top_p=1.0, top_k=1)
        return {
            "temperature": _near(free[1], wanted[free[0]]),
            "truncated": _near(cut[1], wanted[cut[0]]),
            "head": self._applies_heads(head),
        }

    def _table(self, temperature: float) -> list[float]:
        """All logprobs of the token after the prompt."""
        job = self._job(temperature=temperature, top_p=1.0, top_k=0, top=self._vocab)
        ids, logprobs = self._engine.run([job])["probe"][3][0]
        table = [-math.inf] * self._vocab
        for id_, logprob in zip(ids, logprobs, strict=True):
            table[id_] = logprob
        return table

    def _applies_heads(self, head: Frame) -> bool:
        try:
            self._engine.load(_PROBE_ID, "openrl-probe", head["folder"])
            drawn = self._one(temperature=0.0, top_p=1.0, top_k=0, adapter=_PROBE_ID)
        except Exception:  # noqa: BLE001 -- whatever it is: this vLLM takes no adapter of the head
            traceback.print_exc()
            return False
        finally:
            self._engine.forget(_PROBE_ID)
        base = self._one(temperature=0.0, top_p=1.0, top_k=0)
        return drawn[0] in head["tokens"] and _near(drawn[1], 0.0) and base != drawn

    def _one(self, **job: Any) -> tuple[int, float]:
        part = self._engine.run([self._job(**job)])["probe"]
        return part[1][0], part[2][0]

    def _job(self, **job: Any) -> Frame:
        usual = {"key": "probe", "prompt": self._prompt, "adapter": None, "seed": 0, "max_tokens": 1, "stop": []}
        return {**usual, "top": 0, "stream": False, **job}


def _near(a: float, b: float) -> bool:
    return abs(a - b) < 0.02  # bf16 logits are rounded; what is looked for is off by far more


class Server:
    """Serves frames with an engine, in the thread that computes."""

    def __init__(self, engine: Engine, link: Link, inbox: queue.SimpleQueue[Frame]) -> None:
        self._engine = engine
        self._link = link
        self._inbox = inbox
        self._steps = 0
        self._seconds = 0.0
        self._told = 0.0

    def run(self) -> None:
        while True:
            self._read()
            if self._engine.busy:
                began = time.perf_counter()
                parts = self._engine.step()
                self._seconds += time.perf_counter() - began
                self._steps += 1
                if parts:
                    self._tell({"op": "drawn", "parts": parts})
            if not self._engine.busy or time.monotonic() - self._told > _ALIVE_SECONDS:
                self._tell({"op": "alive"})

    def _read(self) -> None:
        """Take all frames that have come; wait for one if there is nothing to compute."""
        try:
            frame = self._inbox.get(timeout=_IDLE_SECONDS) if not self._engine.busy else self._inbox.get_nowait()
            while True:
                self._take(frame)
                frame = self._inbox.get_nowait()
        except queue.Empty:
            pass

    def _take(self, frame: Frame) -> None:
        match frame["op"]:
            case "adapter":
                self._answer({"op": "adapter", "id": frame["id"]}, self._engine.load, *_named(frame))
            case "forget":
                self._engine.forget(frame["id"])
            case "draw":
                self._answer({"op": "failed", "key": frame["key"]}, self._engine.draw, frame)
            case "cancel":
                self._engine.cancel(frame["keys"])
            case other:
                raise ValueError(f"unknown frame {other!r}")

    def _answer(self, failure: Frame, action: Any, *args: Any) -> None:
        """What one frame asks for cannot end the others; vLLM says why in the log and in the answer."""
        try:
            action(*args)
        except Exception as error:  # noqa: BLE001 -- vLLM's own, of any kind
            traceback.print_exc()
            self._link.send({**failure, "error": f"{type(error).__name__}: {error}"})

    def _tell(self, frame: Frame) -> None:
        self._link.send({**frame, "steps": self._steps, "seconds": self._seconds})
        self._steps, self._seconds, self._told = 0, 0.0, time.monotonic()


def _named(frame: Frame) -> tuple[int, str, str]:
    return frame["id"], frame["name"], frame["folder"]


def _set_environment(opening: Frame) -> None:
    """What vLLM, torch and OpenMP read when they are loaded."""
    variables: dict[str, str] = opening["env"]
    os.environ.update(variables)  # noqa: TID251 -- a program of its own
    gpu = opening["gpu"]
    if gpu is not None:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")  # noqa: TID251
        names = [name for name in seen.split(",") if name]
        os.environ["CUDA_VISIBLE_DEVICES"] = names[gpu] if gpu < len(names) else str(gpu)  # noqa: TID251


def _arguments(opening: Frame) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": opening["folder"],
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": opening["dtype"],
        "hf_overrides": {"head_dtype": "float32"},  # as the training half has it (L6)
        "max_model_len": opening["context"],
        "max_num_seqs": opening["rows"],
        "enforce_eager": opening["eager"],
        "gpu_memory_utilization": opening["fraction"],
        "enable_prefix_caching": True,
        "enable_lora": True,
        "max_loras": opening["adapters"],
        "max_cpu_loras": opening["adapters"],
        "max_lora_rank": opening["rank"],
        "max_logprobs": -1,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
    }
    if opening["vocab"] > _LARGEST_HEAD:
        arguments["lora_target_modules"] = _LAYERS
    return arguments


def _die_with_parent() -> None:
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _pipes() -> Link:
    """The pipes to the worker. vLLM and its libraries print to stdout: that goes to the log with stderr from now on."""
    inlet, outlet = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return Link(inlet, outlet)


def _read(link: Link, inbox: queue.SimpleQueue[Frame]) -> None:
    """Keep the pipe empty, so that the worker never waits; end with it."""
    while (frame := link.receive()) is not None:
        inbox.put(frame)
    os._exit(0)


def main() -> int:
    """Open what the first frame says, then serve. Returns the exit code of a vLLM that cannot start."""
    _die_with_parent()
    sys.path.pop(0)  # this file's folder, whose modules are none of vLLM's
    link = _pipes()
    opening = link.receive()
    if opening is None:
        return 0
    inbox: queue.SimpleQueue[Frame] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(link, inbox), daemon=True, name="inbox").start()
    try:
        engine = Engine(opening)
        probe = opening["probe"]
        can = Probe(engine, probe["prompt"], opening["vocab"]).can(probe["head"])
    except Exception as error:  # noqa: BLE001 -- what stops vLLM is told to the worker
        traceback.print_exc()
        link.send({"op": "unusable", "error": f"{type(error).__name__}: {error}"})
        return 1
    link.send({"op": "ready", "vllm": engine.vllm.__version__, "can": can, "kv_tokens": engine.kv_tokens})
    Server(engine, link, inbox).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
