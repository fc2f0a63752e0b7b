"""A burst of requests is let in bit by bit, and what must be quick does not stand behind it."""

from __future__ import annotations

import asyncio

from starlette.types import Receive, Scope, Send

from openrl.server.turnstile import Turnstile


class App:
    """Notes in which round of the loop each request began."""

    def __init__(self) -> None:
        self.rounds: dict[str, int] = {}
        self.round = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.rounds[scope["path"]] = self.round

    async def count(self) -> None:
        while True:
            self.round += 1
            await asyncio.sleep(0)


async def receive() -> dict[str, str]:
    return {"type": "http.disconnect"}


async def send(message: object) -> None:
    raise AssertionError(message)


def begin(door: Turnstile, path: str) -> asyncio.Task[None]:
    return asyncio.create_task(door({"type": "http", "path": path}, receive, send))  # type: ignore[arg-type]


def test_a_burst_is_spread_over_rounds_in_order_and_the_express_goes_through() -> None:
    async def main() -> App:
        app = App()
        door = Turnstile(app, express={"/beat"})
        counting = asyncio.create_task(app.count())
        burst = [begin(door, f"/{i}") for i in range(100)]
        beat = begin(door, "/beat")
        await asyncio.gather(*burst, beat)
        counting.cancel()
        return app

    app = asyncio.run(main())
    per_round = [list(app.rounds.values()).count(number) for number in range(app.round + 1)]
    assert max(per_round) <= 16 + 1
    assert list(app.rounds) == sorted(app.rounds, key=lambda path: (app.rounds[path], 0))
    assert app.rounds["/beat"] <= min(app.rounds.values()) + 1
    burst = [path for path in app.rounds if path != "/beat"]
    assert burst == [f"/{i}" for i in range(100)]


def test_a_client_that_hangs_up_in_the_queue_takes_no_place() -> None:
    async def main() -> App:
        app = App()
        door = Turnstile(app)
        burst = [begin(door, f"/{i}") for i in range(60)]
        await asyncio.sleep(0)
        for task in burst[20:40]:
            task.cancel()
        await asyncio.gather(*burst, return_exceptions=True)
        await asyncio.wait_for(begin(door, "/later"), 1)
        return app

    app = asyncio.run(main())
    assert list(app.rounds) == [f"/{i}" for i in (*range(20), *range(40, 60))] + ["/later"]
