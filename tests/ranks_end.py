"""One process of a crew that looks, at its very end, for the threads that carried its messages."""

import atexit
import importlib
import os
import sys
from pathlib import Path

import torch

from fedlamb.simulate.crew import Crew


def carriers() -> int:
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return sum("gloo_runloop" in name for name in names)


def look(before: list[int]) -> None:
    if carriers() >= before[0]:
        os._exit(3)


def main() -> None:
    before: list[int] = []
    atexit.register(look, before)  # called after what the crew registers
    if "--own-group" in sys.argv:  # a script that has met the others already
        torch.distributed.init_process_group("gloo")
    crew = Crew.join(torch.device("cpu"))
    importlib.import_module("torch.distributed.nn")  # keeps the default group for good
    assert crew.total({"ranks": torch.tensor(1.0)}) == {"ranks": torch.tensor(2.0)}
    before.append(carriers())


if __name__ == "__main__":
    main()
