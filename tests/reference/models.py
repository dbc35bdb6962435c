"""Three small models with gradients derived by hand, in float64 and one example at a time.

Names, shapes and losses follow PyTorch: ``nn.Linear`` computes ``W x + b`` with ``W`` of shape
(outputs, inputs), and every loss is a mean.
"""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = dict[str, Array]
Data = NDArray[Any]


class Model(Protocol):
    """What the methods need to know of a model."""

    shapes: dict[str, tuple[int, ...]]

    def loss(self, params: Params, x: Data, y: Data) -> float:
        """Mean loss over the examples."""

    def grad(self, params: Params, x: Data, y: Data) -> Params:
        """Mean gradient over the examples."""

    def predict(self, params: Params, x: Data) -> Array:
        """Outputs of the model, (examples, outputs); class scores are not normalised."""


class LinearRegression:
    """y = W x + b under the squared error, averaged over examples and outputs (``mse_loss``).

    The targets have shape (examples, outputs).
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        self.outputs = outputs
        self.shapes: dict[str, tuple[int, ...]] = {
            "weight": (outputs, inputs),
            "bias": (outputs,),
        }

    def predict(self, params: Params, x: Data) -> Array:
        """Outputs, (examples, outputs)."""
        x = np.asarray(x, dtype=np.float64)
        return np.stack([params["weight"] @ row + params["bias"] for row in x])

    def loss(self, params: Params, x: Data, y: Data) -> float:
        """Mean loss over the examples."""
        out = self.predict(params, x)
        total = 0.0
        for k in range(len(x)):
            total += float(np.sum((out[k] - y[k]) ** 2))
        return total / (len(x) * self.outputs)

    def grad(self, params: Params, x: Data, y: Data) -> Params:
        """Mean gradient over the examples."""
        x = np.asarray(x, dtype=np.float64)
        total = {name: np.zeros(shape) for name, shape in self.shapes.items()}
        for k in range(len(x)):
            out = params["weight"] @ x[k] + params["bias"]
            d_out = 2.0 * (out - y[k]) / self.outputs
            total["weight"] += np.outer(d_out, x[k])
            total["bias"] += d_out
        return {name: value / len(x) for name, value in total.items()}


class SoftmaxRegression:
    """Linear class scores W x + b under the cross-entropy, averaged over examples.

    The targets are class numbers of shape (examples,).
    """

    def __init__(self, inputs: int, classes: int) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {
            "weight": (classes, inputs),
            "bias": (classes,),
        }

    def predict(self, params: Params, x: Data) -> Array:
        """Class scores, (examples, classes)."""
        x = np.asarray(x, dtype=np.float64)
        return np.stack([params["weight"] @ row + params["bias"] for row in x])

    def loss(self, params: Params, x: Data, y: Data) -> float:
        """Mean loss over the examples."""
        scores = self.predict(params, x)
        total = 0.0
        for k in range(len(x)):
            top = np.max(scores[k])
            log_sum = top + np.log(np.sum(np.exp(scores[k] - top)))
            total += float(log_sum - scores[k][int(y[k])])
        return total / len(x)

    def grad(self, params: Params, x: Data, y: Data) -> Params:
        """Mean gradient over the examples."""
        x = np.asarray(x, dtype=np.float64)
        total = {name: np.zeros(shape) for name, shape in self.shapes.items()}
        for k in range(len(x)):
            scores = params["weight"] @ x[k] + params["bias"]
            d_scores = np.exp(scores - np.max(scores))
            d_scores /= np.sum(d_scores)
            d_scores[int(y[k])] -= 1.0
            total["weight"] += np.outer(d_scores, x[k])
            total["bias"] += d_scores
        return {name: value / len(x) for name, value in total.items()}


class MLP:
    """``nn.Sequential(Linear, Tanh, Linear)`` under the cross-entropy, averaged over examples.

    The targets are class numbers of shape (examples,).
    """

    def __init__(self, inputs: int, hidden: int, classes: int) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {
            "0.weight": (hidden, inputs),
            "0.bias": (hidden,),
            "2.weight": (classes, hidden),
            "2.bias": (classes,),
        }

    def predict(self, params: Params, x: Data) -> Array:
        """Class scores, (examples, classes)."""
        x = np.asarray(x, dtype=np.float64)
        rows = []
        for row in x:
            hidden = np.tanh(params["0.weight"] @ row + params["0.bias"])
            rows.append(params["2.weight"] @ hidden + params["2.bias"])
        return np.stack(rows)

    def loss(self, params: Params, x: Data, y: Data) -> float:
        """Mean loss over the examples."""
        scores = self.predict(params, x)
        total = 0.0
        for k in range(len(x)):
            top = np.max(scores[k])
            log_sum = top + np.log(np.sum(np.exp(scores[k] - top)))
            total += float(log_sum - scores[k][int(y[k])])
        return total / len(x)

    def grad(self, params: Params, x: Data, y: Data) -> Params:
        """Mean gradient over the examples."""
        x = np.asarray(x, dtype=np.float64)
        total = {name: np.zeros(shape) for name, shape in self.shapes.items()}
        for k in range(len(x)):
            hidden = np.tanh(params["0.weight"] @ x[k] + params["0.bias"])
            scores = params["2.weight"] @ hidden + params["2.bias"]
            d_scores = np.exp(scores - np.max(scores))
            d_scores /= np.sum(d_scores)
            d_scores[int(y[k])] -= 1.0
            d_hidden = params["2.weight"].T @ d_scores
            d_inner = d_hidden * (1.0 - hidden**2)  # tanh' = 1 - tanh^2
            total["2.weight"] += np.outer(d_scores, hidden)
            total["2.bias"] += d_scores
            total["0.weight"] += np.outer(d_inner, x[k])
            total["0.bias"] += d_inner
        return {name: value / len(x) for name, value in total.items()}
