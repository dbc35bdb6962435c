"""The six methods of SPEC.md, one function each, in plain float64 loops.

Source: Karimi, Li, Li, "Layer-wise and Dimension-wise Locally Adaptive Federated Learning";
"Alg. 1" and "Alg. 2" are its algorithms, and SPEC.md wins where the two differ.

Every function repeats its pseudo-code in full. Shared are only copying, counting, the mean over
the sampled clients and LAYERWISE, which SPEC.md writes down once as well. "Mime" is the paper's
variant (momentum held by the client, no control variate), not the original Mime or MimeLite.
"""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .models import Data, Model, Params

Rows = NDArray[np.intp]
Schedule = Callable[[int], float]
Layers = str | Callable[[str], Hashable]


@dataclass(frozen=True)
class Problem:
    """A federated problem with everything random already drawn."""

    model: Model
    x: Data
    y: Data
    clients: list[Rows]  # the rows of each client's local data
    params: Params  # theta at the start
    cohorts: list[list[int]]  # cohorts[r - 1]: the clients sampled in round r
    batches: Callable[[int, int], list[Rows]]  # (round from 1, client) -> rows of each local step
    weighting: str = "uniform"  # or "examples": mean_S weighted by len(clients[i])


@dataclass(frozen=True)
class Step:
    """A client's state after one local step; t counts from 1."""

    round: int
    client: int
    t: int
    x: Params
    m: Params | None = None
    v: Params | None = None


@dataclass(frozen=True)
class Server:
    """The server's state after one round; what a method does not keep is None."""

    round: int
    params: Params
    v_hat: Params | None = None
    V: Params | None = None
    m: Params | None = None
    v: Params | None = None


@dataclass(frozen=True)
class Traffic:
    """How many single numbers one client sent (up) and was sent (down) in one round."""

    round: int
    client: int
    up: int
    down: int


@dataclass
class Trace:
    """Everything that happened, in the order executed."""

    steps: list[Step] = field(default_factory=list)
    servers: list[Server] = field(default_factory=list)
    traffic: list[Traffic] = field(default_factory=list)


def constant(r: int) -> float:
    """The schedule that leaves the rate as it is."""
    return 1.0


def copy(tree: Params) -> Params:
    """A float64 copy."""
    return {name: np.array(value, dtype=np.float64) for name, value in tree.items()}


def full(params: Params, value: float) -> Params:
    """A vector shaped like params, every coordinate equal to value."""
    return {name: np.full(np.shape(array), value) for name, array in params.items()}


def count(params: Params) -> int:
    """p, the number of parameters."""
    return sum(int(np.size(value)) for value in params.values())


def mean_over_cohort(problem: Problem, reports: dict[int, Params]) -> Params:
    """mean_S: the mean of what each sampled client reported, uniform or weighted by examples."""
    weights: dict[int, float] = {}
    for i in reports:
        if problem.weighting == "uniform":
            weights[i] = 1.0
        elif problem.weighting == "examples":
            weights[i] = float(len(problem.clients[i]))
        else:
            raise ValueError(f"unknown weighting {problem.weighting!r}")
    total = full(problem.params, 0.0)
    for i, report in reports.items():
        for name in total:
            total[name] += weights[i] * report[name]
    return {name: value / sum(weights.values()) for name, value in total.items()}


def group_of(name: str, layers: Layers) -> Hashable:
    """The layer that a parameter belongs to (SPEC.md, "what a layer is")."""
    if layers == "tensor":
        return name
    if layers == "module":
        return name.rpartition(".")[0]
    if isinstance(layers, str):
        raise ValueError(f"unknown layers {layers!r}")
    return layers(name)


def layerwise(
    x: Params,
    psi: Params,
    a: float,
    lam: float,
    layers: Layers,
    phi_min: float,
    phi_max: float,
) -> Params:
    """LAYERWISE of SPEC.md, Eq. (3) of the paper: returns the new x."""
    groups: dict[Hashable, list[str]] = {}
    for name in x:
        groups.setdefault(group_of(name, layers), []).append(name)

    new = copy(x)
    for names in groups.values():
        u = {name: psi[name] + lam * x[name] for name in names}
        norm_x = math.sqrt(sum(float(np.sum(x[name] ** 2)) for name in names))
        norm_u = math.sqrt(sum(float(np.sum(u[name] ** 2)) for name in names))
        if norm_u == 0.0:
            continue
        phi = min(max(norm_x, phi_min), phi_max)
        for name in names:
            new[name] = x[name] - a * phi / norm_u * u[name]
    return new


def check_options(first_round: str, momentum: str, sync_every: int) -> None:
    """Refuse option values that SPEC.md does not name."""
    if first_round not in ("local", "vhat"):
        raise ValueError(f"unknown first_round {first_round!r}")
    if momentum not in ("persist", "reset"):
        raise ValueError(f"unknown momentum {momentum!r}")
    if sync_every < 1:
        raise ValueError(f"sync_every must be at least 1, not {sync_every}")


def fed_sgd(problem: Problem, *, lr: float, schedule: Schedule = constant) -> Trace:
    """Fed-SGD (FedAvg)."""
    model = problem.model
    p = count(problem.params)
    trace = Trace()

    theta = copy(problem.params)

    for r, cohort in enumerate(problem.cohorts, start=1):
        a_r = lr * schedule(r)
        deltas: dict[int, Params] = {}
        for i in cohort:
            x = copy(theta)
            for t, rows in enumerate(problem.batches(r, i), start=1):
                g = model.grad(x, problem.x[rows], problem.y[rows])
                for name in x:
                    x[name] = x[name] - a_r * g[name]
                trace.steps.append(Step(r, i, t, copy(x)))
            deltas[i] = {name: x[name] - theta[name] for name in x}
            trace.traffic.append(Traffic(r, i, up=p, down=p))

        delta = mean_over_cohort(problem, deltas)
        for name in theta:
            theta[name] = theta[name] + delta[name]
        trace.servers.append(Server(r, copy(theta)))
    return trace


def adp_fed(
    problem: Problem,
    *,
    lr: float,
    server_lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    schedule: Schedule = constant,
) -> Trace:
    """Adp-Fed (Alg. 2): local SGD, Adam without bias correction on the mean change."""
    model = problem.model
    p = count(problem.params)
    trace = Trace()

    theta = copy(problem.params)  # Alg. 2, line 2
    m = full(theta, 0.0)
    v = full(theta, eps)

    for r, cohort in enumerate(problem.cohorts, start=1):
        eta_l = lr * schedule(r)  # SPEC.md: the schedule acts on eta_l
        deltas: dict[int, Params] = {}
        for i in cohort:
            x = copy(theta)  # Alg. 2, line 5
            for t, rows in enumerate(problem.batches(r, i), start=1):
                # Alg. 2, line 7; SPEC.md: at the current x, not at theta^0
                g = model.grad(x, problem.x[rows], problem.y[rows])
                for name in x:
                    x[name] = x[name] - eta_l * g[name]  # Alg. 2, line 8
                trace.steps.append(Step(r, i, t, copy(x)))
            deltas[i] = {name: x[name] - theta[name] for name in x}  # Alg. 2, line 10
            trace.traffic.append(Traffic(r, i, up=p, down=p))

        d = mean_over_cohort(problem, deltas)  # Alg. 2, line 12; SPEC.md: over the sampled
        for name in theta:
            m[name] = beta1 * m[name] + (1.0 - beta1) * d[name]  # Alg. 2, line 13
            v[name] = beta2 * v[name] + (1.0 - beta2) * d[name] ** 2  # Alg. 2, line 14
            theta[name] = theta[name] + server_lr * m[name] / np.sqrt(v[name])  # Alg. 2, line 15
        trace.servers.append(Server(r, copy(theta), m=copy(m), v=copy(v)))
    return trace


def fed_ams(
    problem: Problem,
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    first_round: str = "local",
    momentum: str = "persist",
    sync_every: int = 1,
    schedule: Schedule = constant,
) -> Trace:
    """Fed-AMS: Alg. 1 (blue) without the layer-wise scaling of line 13."""
    check_options(first_round, momentum, sync_every)
    model = problem.model
    p = count(problem.params)
    n = len(problem.clients)
    trace = Trace()

    theta = copy(problem.params)  # Alg. 1, line 2
    v_hat = full(theta, eps)
    version = 0  # of v_hat; everybody knows version 0 without being sent it

    client_m = {i: full(theta, 0.0) for i in range(n)}
    client_v_hat = {i: full(theta, eps) for i in range(n)}
    client_version = dict.fromkeys(range(n), 0)

    for r, cohort in enumerate(problem.cohorts, start=1):
        a_r = lr * schedule(r)
        sync = (r - 1) % sync_every == 0
        deltas: dict[int, Params] = {}
        reported_v: dict[int, Params] = {}
        for i in cohort:
            up, down = p, p
            if client_version[i] != version:
                client_v_hat[i] = copy(v_hat)
                client_version[i] = version
                down += p
            held = client_v_hat[i]

            # Alg. 1, line 6
            x = copy(theta)
            m = copy(client_m[i]) if momentum == "persist" else full(theta, 0.0)
            v = copy(held)
            for t, rows in enumerate(problem.batches(r, i), start=1):
                g = model.grad(x, problem.x[rows], problem.y[rows])  # Alg. 1, line 9
                for name in x:
                    m[name] = beta1 * m[name] + (1.0 - beta1) * g[name]  # Alg. 1, line 10
                    v[name] = beta2 * v[name] + (1.0 - beta2) * g[name] ** 2  # Alg. 1, line 11
                    if r == 1 and first_round == "local":
                        den = np.sqrt(v[name])
                    else:
                        den = np.sqrt(held[name])
                    psi = m[name] / den  # Alg. 1, line 12
                    x[name] = x[name] - a_r * psi
                trace.steps.append(Step(r, i, t, copy(x), copy(m), copy(v)))
            client_m[i] = copy(m)
            deltas[i] = {name: x[name] - theta[name] for name in x}  # Alg. 1, line 15
            if sync:
                reported_v[i] = copy(v)  # Alg. 1, line 16
                up += p
            trace.traffic.append(Traffic(r, i, up, down))

        delta = mean_over_cohort(problem, deltas)
        for name in theta:
            theta[name] = theta[name] + delta[name]  # Alg. 1, line 19
        if sync:
            mean_v = mean_over_cohort(problem, reported_v)
            for name in v_hat:
                v_hat[name] = np.maximum(v_hat[name], mean_v[name])  # Alg. 1, line 20
            version += 1
        trace.servers.append(Server(r, copy(theta), v_hat=copy(v_hat)))
    return trace


def fed_lamb(
    problem: Problem,
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    first_round: str = "local",
    momentum: str = "persist",
    layers: Layers = "tensor",
    phi_min: float = 1e-3,
    phi_max: float = math.inf,
    sync_every: int = 1,
    schedule: Schedule = constant,
) -> Trace:
    """Fed-LAMB: Alg. 1 (blue)."""
    check_options(first_round, momentum, sync_every)
    model = problem.model
    p = count(problem.params)
    n = len(problem.clients)
    trace = Trace()

    theta = copy(problem.params)  # Alg. 1, line 2
    v_hat = full(theta, eps)
    version = 0  # of v_hat; everybody knows version 0 without being sent it

    client_m = {i: full(theta, 0.0) for i in range(n)}
    client_v_hat = {i: full(theta, eps) for i in range(n)}
    client_version = dict.fromkeys(range(n), 0)

    for r, cohort in enumerate(problem.cohorts, start=1):
        a_r = lr * schedule(r)
        sync = (r - 1) % sync_every == 0
        deltas: dict[int, Params] = {}
        reported_v: dict[int, Params] = {}
        for i in cohort:
            up, down = p, p
            if client_version[i] != version:
                client_v_hat[i] = copy(v_hat)
                client_version[i] = version
                down += p
            held = client_v_hat[i]

            # Alg. 1, line 6
            x = copy(theta)
            m = copy(client_m[i]) if momentum == "persist" else full(theta, 0.0)
            v = copy(held)
            for t, rows in enumerate(problem.batches(r, i), start=1):
                g = model.grad(x, problem.x[rows], problem.y[rows])  # Alg. 1, line 9
                psi: Params = {}
                for name in x:
                    m[name] = beta1 * m[name] + (1.0 - beta1) * g[name]  # Alg. 1, line 10
                    v[name] = beta2 * v[name] + (1.0 - beta2) * g[name] ** 2  # Alg. 1, line 11
                    if r == 1 and first_round == "local":
                        den = np.sqrt(v[name])
                    else:
                        den = np.sqrt(held[name])
                    psi[name] = m[name] / den  # Alg. 1, line 12
                # Alg. 1, line 13
                x = layerwise(x, psi, a_r, weight_decay, layers, phi_min, phi_max)
                trace.steps.append(Step(r, i, t, copy(x), copy(m), copy(v)))
            client_m[i] = copy(m)
            deltas[i] = {name: x[name] - theta[name] for name in x}  # Alg. 1, line 15
            if sync:
                reported_v[i] = copy(v)  # Alg. 1, line 16
                up += p
            trace.traffic.append(Traffic(r, i, up, down))

        delta = mean_over_cohort(problem, deltas)
        for name in theta:
            theta[name] = theta[name] + delta[name]  # Alg. 1, line 19
        if sync:
            mean_v = mean_over_cohort(problem, reported_v)
            for name in v_hat:
                v_hat[name] = np.maximum(v_hat[name], mean_v[name])  # Alg. 1, line 20
            version += 1
        trace.servers.append(Server(r, copy(theta), v_hat=copy(v_hat)))
    return trace


def mime(
    problem: Problem,
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    first_round: str = "local",
    momentum: str = "persist",
    sync_every: int = 1,
    schedule: Schedule = constant,
) -> Trace:
    """Mime, the paper's variant: Alg. 1 (red) without the layer-wise scaling of line 13."""
    check_options(first_round, momentum, sync_every)
    model = problem.model
    p = count(problem.params)
    n = len(problem.clients)
    trace = Trace()

    theta = copy(problem.params)  # Alg. 1, line 2
    v_hat = full(theta, eps)
    version = 0  # of v_hat; everybody knows version 0 without being sent it
    big_v = full(theta, 0.0)  # V of SPEC.md, v_r of Alg. 1, line 22

    client_m = {i: full(theta, 0.0) for i in range(n)}
    client_v_hat = {i: full(theta, eps) for i in range(n)}
    client_version = dict.fromkeys(range(n), 0)

    for r, cohort in enumerate(problem.cohorts, start=1):
        a_r = lr * schedule(r)
        sync = (r - 1) % sync_every == 0
        deltas: dict[int, Params] = {}
        full_gradients: dict[int, Params] = {}
        for i in cohort:
            up, down = p, p
            if client_version[i] != version:
                client_v_hat[i] = copy(v_hat)
                client_version[i] = version
                down += p
            held = client_v_hat[i]

            # Alg. 1, line 6
            x = copy(theta)
            m = copy(client_m[i]) if momentum == "persist" else full(theta, 0.0)
            v = copy(held)
            for t, rows in enumerate(problem.batches(r, i), start=1):
                g = model.grad(x, problem.x[rows], problem.y[rows])  # Alg. 1, line 9
                for name in x:
                    m[name] = beta1 * m[name] + (1.0 - beta1) * g[name]  # Alg. 1, line 10
                    # SPEC.md runs v on Mime's clients too: round 1 may divide by it
                    v[name] = beta2 * v[name] + (1.0 - beta2) * g[name] ** 2
                    if r == 1 and first_round == "local":
                        den = np.sqrt(v[name])
                    else:
                        den = np.sqrt(held[name])
                    psi = m[name] / den  # Alg. 1, line 12
                    x[name] = x[name] - a_r * psi
                trace.steps.append(Step(r, i, t, copy(x), copy(m), copy(v)))
            client_m[i] = copy(m)
            deltas[i] = {name: x[name] - theta[name] for name in x}  # Alg. 1, line 15
            if sync:
                # Alg. 1, line 17: all local data, at theta before the round
                own = problem.clients[i]
                full_gradients[i] = model.grad(theta, problem.x[own], problem.y[own])
                up += p
            trace.traffic.append(Traffic(r, i, up, down))

        delta = mean_over_cohort(problem, deltas)
        for name in theta:
            theta[name] = theta[name] + delta[name]  # Alg. 1, line 19
        if sync:
            mean_g = mean_over_cohort(problem, full_gradients)  # Alg. 1, line 21
            for name in v_hat:
                # Alg. 1, lines 22 and 23
                big_v[name] = beta2 * big_v[name] + (1.0 - beta2) * mean_g[name] ** 2
                v_hat[name] = np.maximum(v_hat[name], big_v[name])
            version += 1
        trace.servers.append(Server(r, copy(theta), v_hat=copy(v_hat), V=copy(big_v)))
    return trace


def mime_lamb(
    problem: Problem,
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    first_round: str = "local",
    momentum: str = "persist",
    layers: Layers = "tensor",
    phi_min: float = 1e-3,
    phi_max: float = math.inf,
    sync_every: int = 1,
    schedule: Schedule = constant,
) -> Trace:
    """Mime-LAMB: Alg. 1 (red)."""
    check_options(first_round, momentum, sync_every)
    model = problem.model
    p = count(problem.params)
    n = len(problem.clients)
    trace = Trace()

    theta = copy(problem.params)  # Alg. 1, line 2
    v_hat = full(theta, eps)
    version = 0  # of v_hat; everybody knows version 0 without being sent it
    big_v = full(theta, 0.0)  # V of SPEC.md, v_r of Alg. 1, line 22

    client_m = {i: full(theta, 0.0) for i in range(n)}
    client_v_hat = {i: full(theta, eps) for i in range(n)}
    client_version = dict.fromkeys(range(n), 0)

    for r, cohort in enumerate(problem.cohorts, start=1):
        a_r = lr * schedule(r)
        sync = (r - 1) % sync_every == 0
        deltas: dict[int, Params] = {}
        full_gradients: dict[int, Params] = {}
        for i in cohort:
            up, down = p, p
            if client_version[i] != version:
                client_v_hat[i] = copy(v_hat)
                client_version[i] = version
                down += p
            held = client_v_hat[i]

            # Alg. 1, line 6
            x = copy(theta)
            m = copy(client_m[i]) if momentum == "persist" else full(theta, 0.0)
            v = copy(held)
            for t, rows in enumerate(problem.batches(r, i), start=1):
                g = model.grad(x, problem.x[rows], problem.y[rows])  # Alg. 1, line 9
                psi: Params = {}
                for name in x:
                    m[name] = beta1 * m[name] + (1.0 - beta1) * g[name]  # Alg. 1, line 10
                    # SPEC.md runs v on Mime's clients too: round 1 may divide by it
                    v[name] = beta2 * v[name] + (1.0 - beta2) * g[name] ** 2
                    if r == 1 and first_round == "local":
                        den = np.sqrt(v[name])
                    else:
                        den = np.sqrt(held[name])
                    psi[name] = m[name] / den  # Alg. 1, line 12
                # Alg. 1, line 13
                x = layerwise(x, psi, a_r, weight_decay, layers, phi_min, phi_max)
                trace.steps.append(Step(r, i, t, copy(x), copy(m), copy(v)))
            client_m[i] = copy(m)
            deltas[i] = {name: x[name] - theta[name] for name in x}  # Alg. 1, line 15
            if sync:
                # Alg. 1, line 17: all local data, at theta before the round
                own = problem.clients[i]
                full_gradients[i] = model.grad(theta, problem.x[own], problem.y[own])
                up += p
            trace.traffic.append(Traffic(r, i, up, down))

        delta = mean_over_cohort(problem, deltas)
        for name in theta:
            theta[name] = theta[name] + delta[name]  # Alg. 1, line 19
        if sync:
            mean_g = mean_over_cohort(problem, full_gradients)  # Alg. 1, line 21
            for name in v_hat:
                # Alg. 1, lines 22 and 23
                big_v[name] = beta2 * big_v[name] + (1.0 - beta2) * mean_g[name] ** 2
                v_hat[name] = np.maximum(v_hat[name], big_v[name])
            version += 1
        trace.servers.append(Server(r, copy(theta), v_hat=copy(v_hat), V=copy(big_v)))
    return trace


METHODS: dict[str, Callable[..., Trace]] = {
    "fed-sgd": fed_sgd,
    "adp-fed": adp_fed,
    "fed-ams": fed_ams,
    "fed-lamb": fed_lamb,
    "mime": mime,
    "mime-lamb": mime_lamb,
}
