"""Adp-Fed: local SGD, and Adam at the server on the mean of the changes.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: Adaptive Federated Optimization.
https://arxiv.org/abs/2003.00295. Here as Algorithm 2 of Karimi, Li, Li: Layer-wise and
Dimension-wise Locally Adaptive Federated Learning, whose line numbers stand beside the code.
"""

from dataclasses import dataclass
from typing import NamedTuple

from .. import trees
from ..algorithm import GradAt, check_hyperparameters
from ..moments import ema, ema_of_square
from ..schedules import Schedule, constant
from ..trees import Scalar, Tree


class Server(NamedTuple):
    """Rounds done so far, the global model (theta), and the two moments of its changes."""

    round: int
    params: Tree
    m: Tree
    v: Tree


class Sent(NamedTuple):
    """This round's local rate and the global model."""

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
class AdpFed:
    """Server Adam. Fields: `lr` (eta_l) and its `schedule`, `server_lr` (eta_g), `beta1`,
    `beta2`, `eps` (the start of v; nothing is added under the root)."""

    lr: Scalar
    server_lr: Scalar
    beta1: Scalar = 0.9
    beta2: Scalar = 0.999
    eps: Scalar = 1e-8
    schedule: Schedule = constant

    def __post_init__(self) -> None:
        check_hyperparameters(self)

    def server_init(self, params: Tree) -> Server:
        m, v = trees.zeros_like(params), trees.full_like(params, self.eps)  # Alg. 2, line 2
        return Server(round=0, params=params, m=m, v=v)

    def broadcast(self, server: Server) -> Sent:
        r = server.round + 1
        return Sent(lr=self.lr * self.schedule(r), params=server.params)

    def client_init(self, params: Tree) -> Client:
        return Client()

    def client_begin(self, client: Client, sent: Sent, full_grad_at: GradAt) -> Local:
        return Local(x=sent.params)  # line 5

    def client_step(self, local: Local, sent: Sent, grad_at: GradAt) -> Local:
        g = grad_at(local.x)  # line 7; the paper's theta^0 is a typo
        return Local(x=trees.add_scaled(local.x, -sent.lr, g))  # line 8

    def client_end(self, local: Local, sent: Sent) -> tuple[Client, Report]:
        return Client(), Report(delta=trees.subtract(local.x, sent.params))  # line 10

    def server_update(self, server: Server, mean: Report) -> Server:
        m = ema(server.m, mean.delta, self.beta1)  # line 13
        v = ema_of_square(server.v, mean.delta, self.beta2)  # line 14
        step = trees.divide(m, trees.sqrt(v))
        params = trees.add_scaled(server.params, self.server_lr, step)  # line 15
        return Server(round=server.round + 1, params=params, m=m, v=v)
