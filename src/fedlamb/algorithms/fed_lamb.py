"""Fed-LAMB: Fed-AMS with layer-wise scaling of every local step.

Karimi, Li, Li: Layer-wise and Dimension-wise Locally Adaptive Federated Learning.
https://arxiv.org/abs/2110.00532. Algorithm 1 (blue); its line numbers stand beside the code.
"""

from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple

from .. import trees
from ..algorithm import GradAt, Kept, check_hyperparameters, is_sync
from ..layerwise import Layers, layerwise_update
from ..moments import ema, ema_of_square
from ..schedules import Schedule, constant
from ..trees import Scalar, Tree


class Server(NamedTuple):
    """Rounds done so far, the global model (theta), and the shared second moment."""

    round: int
    params: Tree
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
    """The local model, its two moments, and the divisor of this round ({}: sqrt(v))."""

    x: Tree
    m: Tree
    v: Tree
    den: Tree


class Report(NamedTuple):
    """The change of the model; in a sync round, the local second moment."""

    delta: Tree
    v: Tree


@dataclass(frozen=True, kw_only=True)
class FedLAMB:
    """Fed-LAMB. Fields: `lr` (alpha) and its `schedule`, `beta1`, `beta2`, `eps` (the start of
    v_hat), `weight_decay` (lambda), `first_round`, `momentum`, `layers`,
    `phi_min`, `phi_max`, `sync_every` (Z)."""

    lr: Scalar
    beta1: Scalar = 0.9
    beta2: Scalar = 0.999
    eps: Scalar = 1e-8
    weight_decay: Scalar = 0.0
    first_round: Literal["local", "vhat"] = "local"
    momentum: Literal["persist", "reset"] = "persist"
    layers: Layers = "tensor"
    phi_min: Scalar = 1e-3
    phi_max: Scalar = inf
    sync_every: int = 1
    schedule: Schedule = constant

    def __post_init__(self) -> None:
        check_hyperparameters(self)

    def server_init(self, params: Tree) -> Server:
        v_hat = trees.full_like(params, self.eps)  # Alg. 1, line 2
        return Server(round=0, params=params, v_hat=Kept(version=0, tree=v_hat))

    def broadcast(self, server: Server) -> Sent:
        r = server.round + 1
        own_v, sync = r == 1 and self.first_round == "local", is_sync(r, self.sync_every)
        return Sent(own_v, sync, self.lr * self.schedule(r), server.params, server.v_hat)

    def client_init(self, params: Tree) -> Client:
        return Client(m=trees.zeros_like(params) if self.momentum == "persist" else {})

    def client_begin(self, client: Client, sent: Sent, full_grad_at: GradAt) -> Local:
        m = client.m or trees.zeros_like(sent.params)
        v_hat = sent.v_hat.tree
        den = {} if sent.own_v else trees.sqrt(v_hat)
        return Local(x=sent.params, m=m, v=v_hat, den=den)  # line 6

    def client_step(self, local: Local, sent: Sent, grad_at: GradAt) -> Local:
        g = grad_at(local.x)  # line 9
        m = ema(local.m, g, self.beta1)  # line 10
        v = ema_of_square(local.v, g, self.beta2)  # line 11; the paper's v_{r-1} is a typo
        psi = trees.divide(m, local.den or trees.sqrt(v))  # line 12
        x = layerwise_update(  # line 13
            local.x, psi, sent.lr, self.weight_decay, self.layers, self.phi_min, self.phi_max
        )
        return Local(x=x, m=m, v=v, den=local.den)

    def client_end(self, local: Local, sent: Sent) -> tuple[Client, Report]:
        client = Client(m=local.m if self.momentum == "persist" else {})
        delta = trees.subtract(local.x, sent.params)  # line 15
        v = local.v if sent.sync else {}
        return client, Report(delta=delta, v=v)  # line 16

    def server_update(self, server: Server, mean: Report) -> Server:
        params = trees.add(server.params, mean.delta)  # line 19
        v_hat = server.v_hat
        if mean.v:
            v_hat = Kept(v_hat.version + 1, trees.maximum(v_hat.tree, mean.v))  # line 20
        return Server(server.round + 1, params, v_hat)
