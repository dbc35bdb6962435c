"""Normalisation and augmentation on batches, against one image at a time in NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedlamb as fl
from fedlamb.plan import Plan
from fedlamb.simulate.loop import Autograd
from fedlamb.tasks.images import Batch, channel_statistics


def one_by_one(images, draws, crop, mean, std):
    found = []
    for image, (down, right, flip) in zip(images, draws, strict=True):
        height, width = image.shape[1:]
        padded = np.pad(image, ((0, 0), (crop, crop), (crop, crop)))
        top, left = down % (2 * crop + 1), right % (2 * crop + 1)
        cut = padded[:, top : top + height, left : left + width]
        if flip % 2:
            cut = cut[:, :, ::-1]
        found.append((cut - np.array(mean)[:, None, None]) / np.array(std)[:, None, None])
    return np.stack(found)


@given(
    seed=st.integers(0, 999),
    shape=st.sampled_from([(1, 5, 5), (3, 4, 7), (3, 8, 6)]),
    crop=st.integers(1, 4),
)
def test_augmentation_equals_padding_cropping_and_flipping_one_image(seed, shape, crop):
    draw = np.random.default_rng(seed)
    images = draw.integers(256, size=(6, *shape), dtype=np.uint8)
    draws = draw.integers(2**31, size=(6, 3))
    mean, std = tuple(draw.uniform(0, 255, shape[0])), tuple(draw.uniform(1, 99, shape[0]))
    inputs = fl.Images(mean, std, crop)
    found = inputs.prepared(torch.from_numpy(images), torch.from_numpy(draws), torch.float64)
    expected = one_by_one(images, draws, crop, mean, std)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=1e-12)


def test_every_shift_and_both_flips_are_drawn():
    plan = Plan([torch.arange(4)], 1.0, 4, 1, seed=0)
    draws = plan.draws(1, 0, 4000)
    assert set((draws[:, 0] % 9).tolist()) == set(range(9)) == set((draws[:, 1] % 9).tolist())
    assert 0.45 < (draws[:, 2] % 2).double().mean() < 0.55
    assert torch.equal(draws, plan.draws(1, 0, 4000))
    for other in (plan.draws(2, 0, 4000), plan.draws(1, 1, 4000)):
        assert not torch.equal(draws, other)


def test_statistics_are_those_of_all_pixels():
    images = np.random.default_rng(0).integers(256, size=(5000, 3, 4, 4), dtype=np.uint8)
    mean, std = channel_statistics(torch.from_numpy(images))
    np.testing.assert_allclose(mean, images.mean(axis=(0, 2, 3)), rtol=1e-13)
    np.testing.assert_allclose(std, images.std(axis=(0, 2, 3)), rtol=1e-13)


def image_task(crop: int) -> fl.Task:
    draw = np.random.default_rng(0)
    x = draw.integers(256, size=(24, 3, 6, 6), dtype=np.uint8)
    y = draw.integers(4, size=24)
    inputs = fl.Images((120.0, 130.0, 110.0), (60.0, 50.0, 70.0), crop)
    model = fl.mlp(108, [5], 4).double()
    return fl.Task(model, (x, y), (x[:8], y[:8]), inputs=inputs, validation=(x[8:], y[8:]))


def test_images_stay_uint8_and_evaluation_and_full_gradients_are_not_augmented():
    with_crop, without = image_task(crop=2), image_task(crop=0)
    assert with_crop.train[0].dtype == torch.uint8
    start = with_crop.params
    measured = with_crop.evaluate(start, {})
    assert measured == without.evaluate(start, {})
    assert {"test_accuracy", "test_loss", "validation_accuracy", "validation_loss"} <= set(measured)
    rows = torch.arange(24)
    full = [Autograd(task).full(start, {}, Batch(rows)) for task in (with_crop, without)]
    assert all(torch.equal(full[0][name], full[1][name]) for name in start)
    draws = Plan([rows], 1.0, 24, 1, seed=0).draws(1, 0, 24)
    steps = [
        Autograd(task).minibatch(start, {}, Batch(rows, draws))[2] for task in (with_crop, without)
    ]
    assert steps[0] != steps[1]
    plain = Autograd(with_crop).minibatch(start, {}, Batch(rows))[2]
    assert torch.equal(plain, steps[1])


@pytest.mark.parametrize("method", [fl.FedLAMB(lr=0.01), fl.Mime(lr=0.001)])
def test_an_augmented_run_is_seeded_and_resumes_to_the_same_bits(tmp_path, method):
    def start(seed=0):
        return fl.fit(
            method,
            image_task(2),
            clients=fl.iid(24, 4),
            rounds=4,
            batch_size=3,
            epochs=2,
            seed=seed,
        )

    whole = list(start())
    assert [r.metrics for r in whole] == [r.metrics for r in start()]
    assert [r.metrics for r in whole] != [r.metrics for r in start(seed=1)]
    first = start()
    next(first), next(first)
    first.save(tmp_path / "c.safetensors")
    rest = start()
    rest.restore(tmp_path / "c.safetensors")
    assert [r.metrics for r in rest] == [r.metrics for r in whole[2:]]
