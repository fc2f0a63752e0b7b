"""In the place of `openrl.selftest.child`: says that all is well, and ends as the family's name tells it to."""

from __future__ import annotations

import os
import sys
import time
from multiprocessing.connection import Connection

from openrl.errors import ModelError
from openrl.selftest.case import Outcome, State
from openrl.selftest.messages import Began, Ended, Opened, Order, Unopened
from openrl.types import DeviceReport, ModelInfo

DEVICE = DeviceReport("fake", "cpu", "float32", 1, 0)


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    order: Order = connection.recv()
    for family, names in order.todo:
        if family == "refused":
            connection.send(Unopened(family, ModelError("not this one.")))
            continue
        if family == "deadly":
            os._exit(7)
        connection.send(Opened(family, ModelInfo(101, 256, 8, 1, family), DEVICE))
        for name in names:
            connection.send(Began(family, name))
            if name == "crash":
                os._exit(9)
            if name == "hang":
                time.sleep(60)
            state = State.FAILED if name == "wrong" else State.OK
            connection.send(Ended(family, Outcome(name, state, "" if state is State.OK else "far off")))
        if family == "apart":
            return


if __name__ == "__main__":
    main()
