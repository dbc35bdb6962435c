"""One step of each kind, with numbers that can be checked by hand."""

import math

import pytest
import torch

import fedlamb as fl

X = {"w": torch.tensor([3.0, 4.0], dtype=torch.float64)}  # norm 5
G = {"w": torch.tensor([0.6, 0.8], dtype=torch.float64)}  # norm 1


def one_round(algorithm, gradients):
    """Server state after a round of one client whose gradients are given, one for each step."""
    server = algorithm.server_init(X)
    sent = algorithm.broadcast(server)
    full = lambda x: G  # noqa: E731
    local = algorithm.client_begin(algorithm.client_init(X), sent, full)
    for g in gradients:
        local = algorithm.client_step(local, sent, lambda x, g=g: g)
    _, report = algorithm.client_end(local, sent)
    return algorithm.server_update(server, report)


def test_fed_sgd():
    """(3, 4) - 0.5 * (0.6, 0.8) twice."""
    server = one_round(fl.FedSGD(lr=0.5), [G, G])
    assert server.params["w"].tolist() == pytest.approx([2.4, 3.2])


def test_adp_fed():
    """d = -0.1 g; m = 0.1 d = (-0.006, -0.008); v = 1e-8 * 0.999 + 0.001 d^2; step m / sqrt(v)."""
    server = one_round(fl.AdpFed(lr=0.1, server_lr=0.01), [G])
    v = [0.999e-8 + 0.001 * 0.06**2, 0.999e-8 + 0.001 * 0.08**2]
    expected = [3 - 0.01 * 0.006 / math.sqrt(v[0]), 4 - 0.01 * 0.008 / math.sqrt(v[1])]
    assert server.params["w"].tolist() == pytest.approx(expected, rel=1e-12)


def test_fed_ams_with_vhat_from_the_start():
    """m = 0.1 g = (0.06, 0.08), divided by sqrt(1e-4) = 0.01, times 0.001."""
    server = one_round(fl.FedAMS(lr=0.001, eps=1e-4, first_round="vhat"), [G])
    assert server.params["w"].tolist() == pytest.approx([3 - 0.006, 4 - 0.008])
    assert server.v_hat.tree["w"].tolist() == pytest.approx(
        [0.999e-4 + 0.001 * 0.36, 0.999e-4 + 0.001 * 0.64]
    )


def test_fed_ams_divides_by_its_own_v_in_round_1():
    """v = 0.999 * 1e-8 + 0.001 g^2, so the step is 0.1 g / sqrt(v)."""
    server = one_round(fl.FedAMS(lr=0.001), [G])
    v = 0.999e-8 + 0.001 * 0.36
    assert server.params["w"][0].item() == pytest.approx(3 - 0.001 * 0.06 / math.sqrt(v))


def test_fed_lamb_moves_by_the_rate_times_the_norm():
    """psi has the direction of g, so the step is 0.1 * 5 * (0.6, 0.8)."""
    server = one_round(fl.FedLAMB(lr=0.1, first_round="vhat"), [G])
    assert server.params["w"].tolist() == pytest.approx([2.7, 3.6])


def test_mime_lamb_takes_its_moment_from_the_full_gradient():
    """V = 0.001 G^2 = (0.00036, 0.00064), both above eps."""
    server = one_round(fl.MimeLAMB(lr=0.1, first_round="vhat"), [G])
    assert server.params["w"].tolist() == pytest.approx([2.7, 3.6])
    assert server.v["w"].tolist() == pytest.approx([0.00036, 0.00064])
    assert server.v_hat.tree["w"].tolist() == pytest.approx([0.00036, 0.00064])


def test_weight_decay_counts_in_the_direction():
    """g = 0: u = lam * x, so the layer shrinks by the rate."""
    zero = {"w": torch.zeros(2, dtype=torch.float64)}
    server = one_round(fl.FedLAMB(lr=0.1, weight_decay=0.01), [zero])
    assert server.params["w"].tolist() == pytest.approx([2.7, 3.6])


def test_a_layer_without_direction_stays():
    zero = {"w": torch.zeros(2, dtype=torch.float64)}
    assert one_round(fl.FedLAMB(lr=0.1), [zero]).params["w"].tolist() == [3.0, 4.0]


def test_decay_after_round_30_acts_from_round_31_on():
    schedule = fl.StepDecay(after=(30, 70), factor=0.1)
    assert [schedule(r) for r in (1, 30, 31, 70, 71)] == pytest.approx([1, 1, 0.1, 0.1, 0.01])
