"""Mime, in the paper's variant: AMSGrad on the clients under a second moment of full gradients.

Karimireddy, Jaggi, Kale, Mohri, Reddi, Stich, Suresh: Mime: Mimicking Centralized Stochastic
Algorithms in Federated Learning. https://arxiv.org/abs/2008.03606. Here as Algorithm 1 (red)
without layer-wise scaling of Karimi, Li, Li: Layer-wise and Dimension-wise Locally Adaptive
Federated Learning: clients hold their own momentum and there is no control variate, unlike in
the original Mime and MimeLite.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from .. import trees
from ..algorithm import GradAt, Kept, check_hyperparameters, is_sync
from ..moments import ema, ema_of_square
from ..schedules import Schedule, constant
from ..trees import Scalar, Tree


class Server(NamedTuple):
    """Rounds done so far, the global model (theta), its second moment (V) and the running max."""

    round: int
    params: Tree
    v: Tree
    v_hat: Kept


class Sent(NamedTuple):
    """Whether clients divide by their own v, whether this round synchronises v_hat, the rate,
    the global model, and the shared second moment."""

    own_v: bool
    sync: bool
    lr: Scalar
    params: Tree
    v_hat: Kept


class Client(NamedTuple):
    """The client's momentum from the last round it took part in; {} where it is reset."""

    m: Tree


class Local(NamedTuple):
    """Model, moments (v only where it divides) and divisor ({}: sqrt(v)); the full gradient."""

    x: Tree
    m: Tree
    v: Tree
    den: Tree
    full_grad: Tree


class Report(NamedTuple):
    """The change of the model; in a sync round, the full gradient at the broadcast model."""

    delta: Tree
    full_grad: Tree


@dataclass(frozen=True, kw_only=True)
class Mime:
    """Mime. Fields: `lr` (alpha) and its `schedule`, `beta1`, `beta2`, `eps` (the start of
    v_hat), `first_round`, `momentum`, `sync_every` (Z)."""

    lr: Scalar
    beta1: Scalar = 0.9
    beta2: Scalar = 0.999
    eps: Scalar = 1e-8
    first_round: Literal["local", "vhat"] = "local"
    momentum: Literal["persist", "reset"] = "persist"
    sync_every: int = 1
    schedule: Schedule = constant

    def __post_init__(self) -> None:
        check_hyperparameters(self)

    def server_init(self, params: Tree) -> Server:
        v, v_hat = trees.zeros_like(params), trees.full_like(params, self.eps)  # Alg. 1, line 2
        return Server(round=0, params=params, v=v, v_hat=Kept(version=0, tree=v_hat))

    def broadcast(self, server: Server) -> Sent:
        r = server.round + 1
        own_v, sync = r == 1 and self.first_round == "local", is_sync(r, self.sync_every)
        return Sent(own_v, sync, self.lr * self.schedule(r), server.params, server.v_hat)

    def client_init(self, params: Tree) -> Client:
        return Client(m=trees.zeros_like(params) if self.momentum == "persist" else {})

    def client_begin(self, client: Client, sent: Sent, full_grad_at: GradAt) -> Local:
        m = client.m or trees.zeros_like(sent.params)
        v_hat = sent.v_hat.tree
        v, den = (v_hat, {}) if sent.own_v else ({}, trees.sqrt(v_hat))
        full_grad = full_grad_at(sent.params) if sent.sync else {}
        return Local(x=sent.params, m=m, v=v, den=den, full_grad=full_grad)  # line 6

    def client_step(self, local: Local, sent: Sent, grad_at: GradAt) -> Local:
        g = grad_at(local.x)  # line 9
        m = ema(local.m, g, self.beta1)  # line 10
        v = ema_of_square(local.v, g, self.beta2) if local.v else {}
        psi = trees.divide(m, local.den or trees.sqrt(v))  # line 12
        x = trees.add_scaled(local.x, -sent.lr, psi)  # line 13 without layer-wise scaling
        return local._replace(x=x, m=m, v=v)

    def client_end(self, local: Local, sent: Sent) -> tuple[Client, Report]:
        client = Client(m=local.m if self.momentum == "persist" else {})
        delta = trees.subtract(local.x, sent.params)  # line 15
        return client, Report(delta=delta, full_grad=local.full_grad)  # line 17

    def server_update(self, server: Server, mean: Report) -> Server:
        params = trees.add(server.params, mean.delta)  # line 19
        v, v_hat = server.v, server.v_hat
        if mean.full_grad:
            v = ema_of_square(v, mean.full_grad, self.beta2)  # line 22
            v_hat = Kept(v_hat.version + 1, trees.maximum(v_hat.tree, v))  # line 23
        return Server(server.round + 1, params, v, v_hat)
