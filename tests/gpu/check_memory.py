"""A GPU with too little memory: fewer clients at once, the same result in float64; or an error.

    python tests/gpu/check_memory.py

The memory is made small by `torch.cuda.set_per_process_memory_fraction`; the errors are real.
"""

import contextlib
import io
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "src"))

import fedlamb as fl
from fedlamb.tasks.models import build_model


def federation(executor):
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(256, (25 * 256, 1, 28, 28), generator=draw, dtype=torch.uint8)
    y = torch.randint(10, (25 * 256,), generator=draw)
    model = build_model("cnn", (1, 28, 28), 10).double().cuda()
    task = fl.Task(model, (x, y), (x[:128], y[:128]), inputs=fl.Images((120.0,), (60.0,)))
    return fl.fit(
        fl.FedLAMB(lr=0.001), task, clients=fl.iid(len(x), 25), rounds=4, executor=executor
    )


def used():
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def allow(more):
    """This many bytes more than are in use now."""
    total = torch.cuda.get_device_properties(0).total_memory
    share = (used() + more) / total
    torch.cuda.set_per_process_memory_fraction(share)


def main():
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    torch.backends.cudnn.allow_tf32 = False
    expected = federation("loop")
    list(expected)
    whole = federation("vectorised")
    before = used()
    torch.cuda.reset_peak_memory_stats()
    list(whole)
    needed = torch.cuda.max_memory_allocated() - before
    print(f"25 clients at once need {needed / 2**20:.0f} MiB")
    run = federation("vectorised")
    allow(needed * 7 // 10)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        done = list(run)
    print(said.getvalue().strip())
    assert "out of device memory with 25 clients at once; trying 12" in said.getvalue()
    assert len(done) == 4
    gap = max(
        float((run.params[n] - p).abs().max() / p.abs().max()) for n, p in expected.params.items()
    )
    print(f"4 rounds in chunks against the loop: {gap:.1e} of the largest parameter")
    assert gap < 1e-9
    torch.cuda.set_per_process_memory_fraction(1.0)
    run = federation("vectorised")
    allow(2 * 2**20)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            next(run)
    except fl.SettingError as error:
        print(f"one client too big: {error}")
    else:
        raise AssertionError("one client fitted")
    torch.cuda.set_per_process_memory_fraction(1.0)
    next(run)
    print("and with memory again, the same run goes on")


if __name__ == "__main__":
    main()
