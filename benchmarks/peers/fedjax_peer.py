"""FedJAX's federated averaging as it is, on XLA's CPU backend with all its threads.

Added here: the two models in Haiku, with PyTorch's distribution of initial weights. FedJAX fills a
client's last batch up to 128 from a second shuffle, where the others take a last batch of 48:
1,280 images per client instead of 1,200. The first round compiles.
"""

import time

import fedjax
import haiku as hk
import jax
import numpy as np
import workload
from jax import numpy as jnp


def start(inputs: int) -> dict[str, hk.initializers.Initializer]:
    """How PyTorch draws weights and biases of a layer with so many inputs per output."""
    drawn = hk.initializers.RandomUniform(-(inputs**-0.5), inputs**-0.5)
    return {"w_init": drawn, "b_init": drawn}


def mlp(batch: dict[str, jnp.ndarray], training: bool = False) -> jnp.ndarray:
    """784-200-10 with ReLU."""
    x = batch["x"].reshape(len(batch["x"]), -1)
    x = jax.nn.relu(hk.Linear(200, **start(784))(x))
    return hk.Linear(10, **start(200))(x)


def cnn(batch: dict[str, jnp.ndarray], training: bool = False) -> jnp.ndarray:
    """The CNN of W2; images are (rows, 28, 28, 1)."""

    def pooled(x: jnp.ndarray) -> jnp.ndarray:
        return jax.nn.relu(hk.max_pool(x, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"))

    x = pooled(hk.Conv2D(10, 5, padding="VALID", **start(25))(batch["x"]))
    x = hk.Conv2D(20, 5, padding="VALID", **start(250))(x)
    if training:
        x = hk.dropout(hk.next_rng_key(), 0.5, x, broadcast_dims=(1, 2))
    x = pooled(x).reshape(len(x), -1)
    x = jax.nn.relu(hk.Linear(50, **start(320))(x))
    if training:
        x = hk.dropout(hk.next_rng_key(), 0.5, x)
    return hk.Linear(10, **start(50))(x)


def main() -> None:
    """Runs the rounds and reports."""
    args = workload.arguments()
    data = workload.load(args.data)
    x, xt = (images.reshape(-1, 28, 28, 1) for images in (data.x, data.xt))
    y, yt = (labels.astype(np.int32) for labels in (data.y, data.yt))
    clients = fedjax.InMemoryFederatedData(
        {
            f"{client:02}": {"x": x[rows], "y": y[rows]}
            for client, rows in enumerate(workload.shards(len(y)))
        }
    )
    test = list(fedjax.ClientDataset({"x": xt, "y": yt}).batch(batch_size=1000))
    model = fedjax.create_model_from_haiku(
        hk.transform(cnn if args.workload == "W2" else mlp),
        sample_batch={"x": x[:1], "y": y[:1]},
        train_loss=lambda batch, logits: fedjax.metrics.unreduced_cross_entropy_loss(
            batch["y"], logits
        ),
        eval_metrics={"accuracy": fedjax.metrics.Accuracy()},
        train_kwargs={"training": True},
        eval_kwargs={"training": False},
    )
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        fedjax.model_grad(model),
        client_optimizer=fedjax.optimizers.sgd(workload.LR),
        server_optimizer=fedjax.optimizers.sgd(1.0),
        client_batch_hparams=fedjax.ShuffleRepeatBatchHParams(workload.BATCH, num_epochs=1),
    )
    sampler = fedjax.client_samplers.UniformGetClientSampler(
        clients, workload.COHORT, seed=workload.SEED
    )
    state = algorithm.init(model.init(jax.random.PRNGKey(workload.SEED)))
    seconds, accuracies = [], []
    for _ in range(args.rounds):
        begun = time.perf_counter()
        state, _ = algorithm.apply(state, sampler.sample())
        found = fedjax.evaluate_model(model, state.params, test)
        accuracies.append(float(found["accuracy"]))
        seconds.append(time.perf_counter() - begun)
    workload.report(seconds, accuracies)


if __name__ == "__main__":
    main()
