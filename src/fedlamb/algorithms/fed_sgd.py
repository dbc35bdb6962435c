"""Fed-SGD, also known as FedAvg: local SGD, and the mean of the changes.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep
Networks from Decentralized Data. https://arxiv.org/abs/1602.05629
"""

from dataclasses import dataclass
from typing import NamedTuple

from .. import trees
from ..algorithm import GradAt, check_hyperparameters
from ..schedules import Schedule, constant
from ..trees import Scalar, Tree


class Server(NamedTuple):
    """Rounds done so far, and the global model (theta)."""

    round: int
    params: Tree


class Sent(NamedTuple):
    """This round's rate and the global model."""

    lr: Scalar
    params: Tree


class Client(NamedTuple):
    """Nothing survives a round."""


class Local(NamedTuple):
    """The local model."""

    x: Tree


class Report(NamedTuple):
    """The change of the local model."""

    delta: Tree


@dataclass(frozen=True, kw_only=True)
class FedSGD:
    """FedAvg. Fields: `lr` (the paper's alpha) and its `schedule`."""

    lr: Scalar
    schedule: Schedule = constant

    def __post_init__(self) -> None:
        check_hyperparameters(self)

    def server_init(self, params: Tree) -> Server:
        return Server(round=0, params=params)

    def broadcast(self, server: Server) -> Sent:
        r = server.round + 1
        return Sent(lr=self.lr * self.schedule(r), params=server.params)

    def client_init(self, params: Tree) -> Client:
        return Client()

    def client_begin(self, client: Client, sent: Sent, full_grad_at: GradAt) -> Local:
        return Local(x=sent.params)

    def client_step(self, local: Local, sent: Sent, grad_at: GradAt) -> Local:
        return Local(x=trees.add_scaled(local.x, -sent.lr, grad_at(local.x)))

    def client_end(self, local: Local, sent: Sent) -> tuple[Client, Report]:
        return Client(), Report(delta=trees.subtract(local.x, sent.params))

    def server_update(self, server: Server, mean: Report) -> Server:
        return Server(round=server.round + 1, params=trees.add(server.params, mean.delta))
