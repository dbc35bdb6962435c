"""The clients of Flower's run, in a module of their own: Ray's processes import it by name."""

from functools import lru_cache
from pathlib import Path

import torch
import workload
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from networks import build, tensors
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

app = ClientApp()


@lru_cache(maxsize=1)
def examples(path: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Images, labels and the rows of each client, loaded once in each process."""
    torch.set_num_threads(1)
    x, y, _, _ = tensors(workload.load(Path(path)))
    return x, y, [torch.from_numpy(rows) for rows in workload.shards(len(y))]


@lru_cache(maxsize=1)
def network(name: str) -> nn.Module:
    """One model in each process, which all its clients use in turn."""
    return build(name)


@app.train()
def train(message: Message, context: Context) -> Message:
    """One local epoch of a client."""
    config = message.content["config"]
    x, y, clients = examples(config["data"])
    model = network(config["workload"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.LR)
    rows = clients[context.node_config["partition-id"]]
    rows = rows[torch.randperm(len(rows))]
    model.train()
    for batch in rows.split(workload.BATCH):
        optimizer.zero_grad()
        cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    content = RecordDict(
        {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": len(rows)}),
        }
    )
    return Message(content=content, reply_to=message)
