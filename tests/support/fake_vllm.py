"""Stands in for the Python that has vLLM: speaks the child's frames without vLLM, and fails as it is told.

Run as `fake_vllm.py FOLDER ...`. `FOLDER/lives.json` is a list with what each start is to do (the last one again and
again); `FOLDER/frames-N.jsonl` has the frames that start N was sent. Token i of a sequence is the seed's last three
digits + i; an adapter adds 1000 times its number, a whole model 10000 times the last letter of its folder's name ("a"
is 1), so that tests see whose weights drew.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any


class Life:
    """One start. `told` may have: "slow" (seconds to the start), "unusable" (why it does not), "crash" or "hang" (at
    the draw of that number, from 1), "mute" (so many draws are never answered), "refuse" (adapters), "stray" (ends
    sequences early), "can"; "exchange" (what to answer to each change of weights, or "crash"; those beyond the list go
    well) and "loads" (its seconds)."""

    def __init__(self, folder: Path) -> None:
        self.number = len(list(folder.glob("frames-*.jsonl")))
        self.frames = (folder / f"frames-{self.number}.jsonl").open("w", buffering=1)
        lives = json.loads((folder / "lives.json").read_text())
        self.told: dict[str, Any] = lives[min(self.number, len(lives) - 1)]
        self.draws = 0
        self.hangs = False
        self.loads = False
        self.lock = threading.Lock()
        self.adapters: set[int] = set()
        self.weights = 0
        self.exchanges = 0

    def receive(self) -> dict[str, Any]:
        head = sys.stdin.buffer.read(4)
        if len(head) < 4:
            raise SystemExit
        frame = json.loads(sys.stdin.buffer.read(struct.unpack(">I", head)[0]))
        self.frames.write(json.dumps(frame) + "\n")
        return frame

    def send(self, frame: dict[str, Any]) -> None:
        body = json.dumps(frame).encode()
        with self.lock:
            sys.stdout.buffer.write(struct.pack(">I", len(body)) + body)
            sys.stdout.buffer.flush()

    def live(self) -> None:
        while not self.hangs:
            while self.loads:
                time.sleep(0.01)
            self.send({"op": "alive", "steps": 0, "seconds": 0.0})
            time.sleep(0.2)

    def run(self) -> None:
        self.receive()
        print(f"life {self.number} of the fake", file=sys.stderr, flush=True)
        time.sleep(self.told.get("slow", 0))
        if "unusable" in self.told:
            print("no such device", file=sys.stderr, flush=True)
            self.send({"op": "unusable", "error": self.told["unusable"]})
            raise SystemExit(1)
        can = {"temperature": True, "truncated": True, "head": True, **self.told.get("can", {})}
        self.send({"op": "ready", "vllm": "0.0.fake", "can": can, "kv_tokens": 1})
        threading.Thread(target=self.live, daemon=True).start()
        while True:
            self.take(self.receive())

    def take(self, frame: dict[str, Any]) -> None:
        if frame["op"] == "adapter":
            if self.told.get("refuse"):
                self.send({"op": "adapter", "id": frame["id"], "error": "ValueError: not this one"})
            else:
                self.adapters.add(frame["id"])
        elif frame["op"] == "forget":
            self.adapters.remove(frame["id"])
        elif frame["op"] == "weights":
            self.exchange(frame["folder"])
        elif frame["op"] == "draw":
            self.draw(frame)

    def exchange(self, folder: str | None) -> None:
        answers: list[Any] = self.told.get("exchange", [])
        answer = answers[self.exchanges] if self.exchanges < len(answers) else {}
        self.exchanges += 1
        self.adapters.clear()
        self.loads = True
        self.send({"op": "loading"})
        time.sleep(self.told.get("loads", 0))
        if answer == "crash":
            print("a fault of the disk", file=sys.stderr, flush=True)
            os._exit(3)
        self.loads = False
        told = {"op": "weights", "error": "", "able": True, "whole": True, **answer}
        good = told["able"] and not told["error"]
        self.weights = ord(folder[-1]) - ord("a") + 1 if folder and good else 0
        self.send(told)

    def draw(self, frame: dict[str, Any]) -> None:
        self.draws += 1
        if self.draws == self.told.get("crash"):
            print("a fault of the device", file=sys.stderr, flush=True)
            os._exit(3)
        if self.draws == self.told.get("hang"):
            self.hangs = True
            time.sleep(3600)
        if self.draws <= self.told.get("mute", 0):
            return
        if frame["adapter"] is not None and frame["adapter"] not in self.adapters:
            self.send({"op": "failed", "key": frame["key"], "error": "its adapter could not be loaded"})
            return
        base = frame["seed"] % 1000 + 1000 * (frame["adapter"] or 0) + 10_000 * self.weights
        tokens = [base + i for i in range(frame["max_tokens"])]
        stopped = next((i + 1 for i, token in enumerate(tokens) if token in frame["stop"]), len(tokens))
        tokens = tokens[: 1 if self.told.get("stray") else stopped]
        parts = [[token] for token in tokens] if frame["stream"] else [tokens]
        for i, part in enumerate(parts):
            tops = [[[7] * frame["top"], [-1.0] * frame["top"]] for _ in part] if frame["top"] else []
            done = i == len(parts) - 1
            drawn = [frame["key"], part, [-0.5] * len(part), tops, done]
            self.send({"op": "drawn", "parts": [drawn], "steps": len(part), "seconds": 0.01})


if __name__ == "__main__":
    Life(Path(sys.argv[1])).run()
