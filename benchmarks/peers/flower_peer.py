"""Flower's simulation engine (Ray), one CPU per client, with its FedAvg strategy as it is.

Added here: the client's loop over sliced tensors, its data and model kept from client to client
in each of Ray's processes. A round lasts from the end of the server's evaluation before it to the
end of its own; what comes before the first round is reported as `startup`. Ray starts its client
processes, and each loads the data, within the first round.
"""

import os
import time
from itertools import pairwise
from pathlib import Path

# Read when Flower and Ray are imported; Ray's processes inherit them.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"
os.environ["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] = "1"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
)

import torch
import workload
from flower_client import app as clients
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from networks import accuracy, build, tensors


def main() -> None:
    """Runs the rounds and reports."""
    begun = time.perf_counter()
    args = workload.arguments()
    torch.set_num_threads(2)
    _, _, xt, yt = tensors(workload.load(args.data))
    model = build(args.workload)
    times: list[float] = []
    accuracies: list[float] = []
    server = ServerApp()

    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        found = accuracy(model, xt, yt)
        if round > 0:
            accuracies.append(found)
        times.append(time.perf_counter())
        return MetricRecord({"accuracy": found})

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        torch.set_num_threads(2)
        strategy = FedAvg(
            fraction_train=workload.COHORT / workload.CLIENTS,
            fraction_evaluate=0.0,
            min_available_nodes=workload.CLIENTS,
        )
        config = {"data": str(args.data.resolve()), "workload": args.workload}
        strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(model.state_dict()),
            num_rounds=args.rounds,
            train_config=ConfigRecord(config),
            evaluate_fn=evaluate,
        )

    run_simulation(
        server_app=server,
        client_app=clients,
        num_supernodes=workload.CLIENTS,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
    seconds = [after - before for before, after in pairwise(times)]
    workload.report(seconds, accuracies, startup=times[0] - begun)


if __name__ == "__main__":
    main()
