"""A seventh algorithm outside the package: FedProx, FedAvg with a pull towards the global model.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks.
"""

from dataclasses import dataclass
from typing import NamedTuple

import fedlamb as fl


class Model(NamedTuple):
    params: fl.Tree


class Client(NamedTuple):
    pass


class Report(NamedTuple):
    delta: fl.Tree


@dataclass(frozen=True, kw_only=True)
class FedProx:
    lr: float
    mu: float = 0.1

    def server_init(self, params):
        return Model(params)

    def broadcast(self, server):
        return server

    def client_init(self, params):
        return Client()

    def client_begin(self, client, sent, full_grad_at):
        return sent

    def client_step(self, local, sent, grad_at):
        x, g = local.params, grad_at(local.params)
        return Model({n: x[n] - self.lr * (g[n] + self.mu * (x[n] - sent.params[n])) for n in x})

    def client_end(self, local, sent):
        return Client(), Report({n: x - sent.params[n] for n, x in local.params.items()})

    def server_update(self, server, mean):
        return Model({n: x + mean.delta[n] for n, x in server.params.items()})


if __name__ == "__main__":
    data = fl.digits()
    task = fl.Task(fl.mlp(64, [64], 10), train=data.train, test=data.test)
    clients = fl.shards(data.train[1], n=20, per_client=2)
    for r in fl.fit(FedProx(lr=0.3), task, clients=clients, rounds=30, batch_size=16):
        print(r.number, f"{r.metrics['test_accuracy']:.3f}", r.uplink_bytes)
