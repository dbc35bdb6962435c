"""What a task is given, checked: each error says which part is wrong, and what is right."""

import copy
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from ..errors import SettingError
from ..randomness import own_random_state
from ..trees import Tree, detached

if TYPE_CHECKING:
    from .task import Task


def trained(model: nn.Module) -> Tree:
    """The parameters that are trained."""
    found = {n: p for n, p in model.named_parameters() if p.requires_grad}
    name = type(model).__name__
    if not found:
        raise SettingError("model", name, "has no parameters to train; it needs at least one")
    if any(isinstance(p, UninitializedParameter) for p in model.parameters()):
        raise SettingError(
            "model", name, "has lazy parameters without a shape; pass one example through it first"
        )
    return detached(found)


_PLAIN = {
    "fedlamb.tasks.models",
    *(
        f"torch.nn.modules.{name}"
        for name in (
            "activation", "batchnorm", "container", "conv", "dropout", "flatten", "instancenorm",
            "linear", "normalization", "padding", "pooling",
        )
    ),
}  # fmt: skip


def of_plain_layers(model: nn.Module) -> bool:
    """Whether all layers are torch's plain ones, or of this library's models, as they come."""
    return all(
        type(layer).__module__ in _PLAIN
        and not isinstance(layer, nn.MultiheadAttention)
        and not (layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer))
        for layer in model.modules()
    )


def checked_metrics(metrics: Any, outputs: Tensor, targets: Tensor) -> Mapping[str, Any]:
    """The metrics, each tried on some outputs and targets."""
    if not isinstance(metrics, Mapping) or "loss" in metrics:
        raise SettingError(
            "metrics", metrics, "must be a dictionary from name to function; 'loss' is taken"
        )
    for name, function in metrics.items():
        try:
            float(function(outputs, targets))
        except Exception as error:
            raise SettingError(
                f"metrics[{name!r}]",
                _name(function),
                f"must map (outputs, targets) to one number, the mean over the examples; {error}",
            ) from error
    return metrics


def checked_pair(name: str, pair: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and targets on the device of `like`; of its dtype where floating."""
    if isinstance(pair, torch.utils.data.Dataset | torch.utils.data.DataLoader):
        right = "must be a pair (inputs, targets) of tensors; a TensorDataset has it as .tensors"
        raise SettingError(name, type(pair).__name__, right)
    try:
        x, y = (torch.as_tensor(part) for part in pair)
    except (TypeError, ValueError) as error:
        raise SettingError(
            name, type(pair).__name__, f"must be a pair (inputs, targets) of tensors; {error}"
        ) from error
    if x.dim() == 0 or y.dim() == 0 or len(x) != len(y) or len(x) == 0:
        raise SettingError(
            name,
            f"inputs {tuple(x.shape)}, targets {tuple(y.shape)}",
            "must hold one target for each input, and at least one",
        )
    for part, tensor in (("inputs", x), ("targets", y)):
        if tensor.is_floating_point():
            bad = ~torch.isfinite(tensor).reshape(len(tensor), -1).all(dim=1)
            if bad.any():
                row = int(bad.nonzero()[0])
                raise SettingError(
                    f"{name} {part}",
                    f"{int(bad.sum())} rows with NaN or infinity",
                    f"must be finite numbers; the first bad row is {row}",
                )
    return _to(x, like, x.dtype), _to(y, like, torch.int64)


def outputs_of_two(task: "Task", labels: bool) -> Tensor:
    """One small pass, so that a model that does not fit the data is told at once."""
    (x, y), (xt, yt) = task.train, task.test
    if x.shape[1:] != xt.shape[1:] or y.shape[1:] != yt.shape[1:]:
        raise SettingError(
            "test",
            f"inputs {_example(xt)}, targets {_example(yt)} each",
            f"must have the shapes of train: inputs {_example(x)}, targets {_example(y)} each",
        )
    if y.is_floating_point() != yt.is_floating_point():
        right = f"must have targets like those of train, which are {y.dtype}"
        raise SettingError("test", f"{yt.dtype} targets", right)
    name = type(task.model).__name__
    fits = f"must fit inputs of shape {_example(x)} and targets of shape {_example(y)} each"
    with torch.no_grad(), own_random_state(task.device), warnings.catch_warnings():
        # torch only warns of outputs and targets that it broadcasts against each other.
        warnings.filterwarnings("error", message="Using a target size")
        _check_training_pass(task, x[:2].clone())
        try:
            outputs = task.outputs(copy.deepcopy(task.model).eval(), x[:2].clone())
        except Exception as error:
            raise SettingError("model", name, f"{fits}; {error}{_whole_inputs(x)}") from error
        if not isinstance(outputs, Tensor):
            kind = type(outputs).__name__
            raise SettingError("model", name, f"must return one tensor, and returns a {kind}")
        if labels and outputs.dim() > 1:
            _check_labels("train", y, outputs.shape[1])
            _check_labels("test", yt, outputs.shape[1])
        if task.loss is nn.functional.mse_loss and outputs.shape != y[:2].shape:
            raise SettingError(
                "model",
                name,
                f"{fits}; its outputs are {_example(outputs)}, and floating targets mean "
                "regression (for classification give labels as whole numbers)",
            )
        try:
            with torch.enable_grad():
                value = task.loss(outputs, y[:2])
        except Exception as error:
            raise SettingError("loss", _name(task.loss), f"{fits}; {error}") from error
    if not isinstance(value, Tensor) or value.dim() != 0:
        raise SettingError(
            "loss", _name(task.loss), "must return a scalar tensor, the mean over the examples"
        )
    if value.requires_grad:
        right = "must depend on outputs and targets alone: parameters of its own are not trained"
        raise SettingError("loss", _name(task.loss), right)
    return outputs


def _check_training_pass(task: "Task", x: Tensor) -> None:
    """In training mode: parameters belong to the algorithm, and outputs depend on them."""
    model, name = copy.deepcopy(task.model).train(), type(task.model).__name__
    try:
        with torch.enable_grad():
            outputs = task.outputs(model, x)
    except Exception:  # told by the pass in evaluation mode, or it is batch norm on one example
        return
    if isinstance(outputs, Tensor) and not outputs.requires_grad:
        raise SettingError(
            "model", name, "must give outputs with a gradient; is there a detach() in forward?"
        )
    for key, parameter in model.named_parameters():
        if key in task.params and not torch.equal(parameter, task.params[key]):
            raise SettingError(
                "model", name, f"must not change its parameters in forward, and changes {key}"
            )


def _to(data: Tensor, like: Tensor, whole: torch.dtype) -> Tensor:
    """On the device of `like`; of its dtype where floating, of `whole` otherwise."""
    dtype = like.dtype if data.is_floating_point() else whole
    return data.detach().to(device=like.device, dtype=dtype).contiguous()


def _check_labels(name: str, labels: Tensor, classes: int) -> None:
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise SettingError(
            f"{name} targets",
            f"labels from {low} to {high}",
            f"must lie from 0 to {classes - 1}, since the model has {classes} outputs",
        )


def _whole_inputs(x: Tensor) -> str:
    if x.is_floating_point():
        return ""
    return f" (inputs are {x.dtype}: x.float() / 255, or inputs=data.inputs, perhaps?)"


def _example(data: Tensor) -> tuple[int, ...]:
    return tuple(data.shape[1:])


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)
