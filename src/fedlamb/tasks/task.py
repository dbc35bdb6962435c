"""What is learnt: a model, a loss, data and metrics. Knows nothing of federation."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from ..errors import SettingError
from ..randomness import own_random_state
from ..trees import Tree, detached, under_vmap
from .checks import checked_metrics, checked_pair, of_plain_layers, outputs_of_two, trained
from .dropout import with_keyed_dropout
from .images import Images
from .linear import with_fast_linear

if TYPE_CHECKING:
    from ..simulate.crew import Crew

Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) -> the mean over the examples, a scalar."""

Precision = Literal["float32", "bf16"]

CHUNK = 1024  # rows at a time wherever all of the data are passed through the model
_CHUNK_ON_CPU = 512  # of test data: as fast, in half of the memory


class Task:
    """A model with its training and test data.

    model: any `nn.Module`; it is copied, never changed, and its parameters are the start.
    train, test: pairs (inputs, targets) of tensors or arrays, first axis = examples. They are
        moved to the model's device; floating inputs are cast to its dtype, whole-number targets
        to int64.
    loss: mean over the examples; by default cross-entropy for whole-number targets and mean
        squared error for floating ones.
    metrics: name -> a function like a loss, reported on the test data as `test_NAME`, beside
        `test_loss`; by default the accuracy, where targets are whole numbers and the model has an
        output for each class.
    validation: examples set aside for tuning, reported as `validation_NAME`.
    inputs: how uint8 images are normalised, and augmented in training; they stay uint8 in memory.
    precision: "bf16" runs the forward pass under autocast; parameters stay as they are.
    """

    def __init__(
        self,
        model: nn.Module,
        train: tuple[Any, Any],
        test: tuple[Any, Any],
        loss: Loss | None = None,
        metrics: Mapping[str, Loss] | None = None,
        validation: tuple[Any, Any] | None = None,
        inputs: Images | None = None,
        precision: Precision = "float32",
    ) -> None:
        if not isinstance(model, nn.Module):
            raise SettingError("model", type(model).__name__, "must be a torch.nn.Module")
        self._given = copy.deepcopy(model)
        self.model = with_fast_linear(with_keyed_dropout(copy.deepcopy(model)))
        self.params = trained(self.model)
        kept = self.model.state_dict(keep_vars=True)
        self.buffers: Tree = detached({n: b for n, b in self.model.named_buffers() if n in kept})
        like = next(iter(self.params.values()))
        self.device = like.device
        self.train = checked_pair("train", train, like)
        self.test = checked_pair("test", test, like)
        self.validation = checked_pair("validation", validation, like) if validation else None
        self.inputs, self._dtype = inputs, like.dtype
        if precision not in ("float32", "bf16"):
            raise SettingError("precision", precision, "must be 'float32' or 'bf16'")
        self.precision = precision
        # Where it pays: convolutions on a CPU take half the time, in bf16 on a GPU less as well.
        convolves = any(isinstance(m, nn.Conv2d) for m in self.model.modules())
        fits = self.device.type == "cpu" or precision == "bf16"
        self.channels_last = convolves and fits and self.train[0].dim() == 4
        classifies = not self.train[1].is_floating_point()
        self.loss: Loss = loss or (
            nn.functional.cross_entropy if classifies else nn.functional.mse_loss
        )
        self.measures_alike = loss is None and metrics is None and of_plain_layers(self._given)
        """Whether the test pass is the same operations every time; functions and layers of one's
        own may decide otherwise, or note what they see."""
        outputs = outputs_of_two(self, labels=classifies and loss is None)
        if metrics is None:
            scored = classifies and outputs.dim() > 1 and outputs.shape[1] > 1
            metrics = {"accuracy": accuracy} if scored else {}
        self.metrics = checked_metrics(metrics, outputs, self.train[1][: len(outputs)])

    def evaluate(
        self,
        params: Tree,
        buffers: Tree,
        crew: "Crew | None" = None,
        outputs_of: Callable[[Tree, Tensor], Tensor] | None = None,
    ) -> dict[str, float]:
        """The loss and every metric on the test (and validation) data, means over the examples.

        The processes of a crew measure a part each. `outputs_of`: another way to run the model.
        """
        found = self.measure(params, buffers, crew, outputs_of)
        return dict(zip(found, torch.stack([*found.values()]).tolist(), strict=True))

    def measure(
        self,
        params: Tree,
        buffers: Tree,
        crew: "Crew | None" = None,
        outputs_of: Callable[[Tree, Tensor], Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """What `evaluate` gives, without waiting for the device."""
        with own_random_state(self.device):
            return self.measured(params, buffers, crew, outputs_of)

    def measured(
        self,
        params: Tree,
        buffers: Tree,
        crew: "Crew | None" = None,
        outputs_of: Callable[[Tree, Tensor], Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """The same under the random state that there is."""
        # Copies, in case the model writes on its inputs or buffers.
        state = {**params, **{name: b.clone() for name, b in buffers.items()}}
        outputs_of = outputs_of or self.outputs_of

        def measured(x: Tensor, y: Tensor) -> dict[str, Tensor]:
            return self._scores(outputs_of(state, x), y)

        found = self._means(measured, crew.rank if crew else 0, crew.size if crew else 1)
        return crew.total(found) if crew else found

    def measure_many(
        self, states: Sequence[tuple[Tree, Tree]], model: nn.Module | None = None
    ) -> list[dict[str, Tensor]]:
        """The same for several (params, buffers) at once; `model`: another way to write it."""
        model = model or self.model
        model.eval()
        stacked = {
            name: torch.stack([{**params, **buffers}[name] for params, buffers in states])
            for name in {**states[0][0], **states[0][1]}
        }

        def measured(x: Tensor, y: Tensor) -> dict[str, Tensor]:
            def one(state: Tree) -> dict[str, Tensor]:
                now = {name: t.clone() for name, t in state.items()}
                outputs = self.outputs(lambda inputs: functional_call(model, now, (inputs,)), x)
                return self._scores(outputs, y)

            return vmap(one, randomness="same")(stacked)

        with own_random_state(self.device):
            found = {name: value.unbind() for name, value in self._means(measured).items()}
        return [{name: v[i] for name, v in found.items()} for i in range(len(states))]

    def _scores(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        measured = {"loss": self.loss, **self.metrics}
        found = {name: function(outputs, targets) for name, function in measured.items()}

        def number(value: Any) -> Tensor:
            found = torch.as_tensor(value, dtype=torch.float64, device=outputs.device)
            return found.reshape(())

        return {name: number(value) for name, value in found.items()}

    def _means(
        self, measured: Callable[[Tensor, Tensor], dict[str, Tensor]], rank: int = 0, ranks: int = 1
    ) -> dict[str, Tensor]:
        """Over the examples of each data set, some at a time, without waiting for the device; of
        several ranks, each sums its part of the mean."""
        self.model.eval()
        found: dict[str, Tensor] = {}
        sets = {"test": self.test, "validation": self.validation}
        most = min(CHUNK, _CHUNK_ON_CPU) if self.device.type == "cpu" else CHUNK
        with torch.no_grad():
            for set_name, data in sets.items():
                if data is None:
                    continue
                count = len(data[1])
                own = slice(count * rank // ranks, count * (rank + 1) // ranks)
                counts = own.stop > own.start  # or else one example stands in, for nothing
                parts = [part[own] if counts else part[:1] for part in data]
                chunks = -(-len(parts[1]) // most)
                for x, y in zip(*(part.tensor_split(chunks) for part in parts), strict=True):
                    for name, value in measured(x.clone(), y).items():
                        key = f"{set_name}_{name}"
                        part = value * (len(y) / count if counts else 0.0)
                        found[key] = found[key] + part if key in found else part
        return found

    def prepared(self, x: Tensor, draws: Tensor | None = None) -> Tensor:
        """Inputs as the model takes them; with `draws`, augmented."""
        return x if self.inputs is None else self.inputs.prepared(x, draws, self._dtype)

    def outputs(
        self, model: Callable[[Tensor], Tensor], x: Tensor, draws: Tensor | None = None
    ) -> Tensor:
        """What the model makes of stored inputs, under the task's precision."""
        x = self.prepared(x, draws)
        if self.channels_last and not under_vmap():
            x = x.to(
                memory_format=torch.channels_last
            )  # contiguous() would leave one channel as it is
        if self.precision == "float32":
            return model(x)
        with torch.autocast(self.device.type, torch.bfloat16):
            found = model(x)
        return found.to(self._dtype) if isinstance(found, Tensor) else found

    def outputs_of(self, state: Tree, x: Tensor) -> Tensor:
        """What the model with these parameters and buffers makes of stored inputs."""
        return self.outputs(lambda inputs: functional_call(self.model, state, (inputs,)), x)

    def laid_out(self, parameter: Tensor) -> Tensor:
        """A parameter, or what belongs to one, as convolutions take it fastest."""
        if self.channels_last and parameter.dim() == 4:
            return parameter.contiguous(memory_format=torch.channels_last)
        return parameter

    @property
    def augments(self) -> bool:
        """Whether training inputs depend on draws."""
        return self.inputs is not None and self.inputs.crop > 0

    def model_with(self, params: Tree, buffers: Tree) -> nn.Module:
        """A copy of the model that holds these parameters and buffers."""
        model = copy.deepcopy(self._given)
        model.load_state_dict({**params, **buffers}, strict=False)
        return model


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of examples whose largest output is the target."""
    return (outputs.argmax(dim=1) == targets).double().mean()
