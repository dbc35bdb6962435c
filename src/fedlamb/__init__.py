"""Layer-wise adaptive federated learning: Fed-LAMB, Mime-LAMB and the methods beside them."""

from .algorithm import Algorithm, GradAt, Kept
from .algorithms import ALGORITHMS, AdpFed, FedAMS, FedLAMB, FedSGD, Mime, MimeLAMB
from .errors import SettingError
from .schedules import Schedule, StepDecay
from .simulate.fit import Round, Run, fit
from .simulate.sweep import Sweep, sweep
from .tasks.datasets import Dataset, digits, load_dataset
from .tasks.images import Images
from .tasks.models import CNN, ResNet18, ViT, mlp
from .tasks.partition import (
    PerRound,
    by_value,
    classes,
    dirichlet,
    from_flower,
    hold_out,
    iid,
    shards,
)
from .tasks.task import Task, accuracy
from .trees import Tree

__version__ = "0.1.0"

__all__ = [
    "ALGORITHMS",
    "CNN",
    "AdpFed",
    "Algorithm",
    "Dataset",
    "FedAMS",
    "FedLAMB",
    "FedSGD",
    "GradAt",
    "Images",
    "Kept",
    "Mime",
    "MimeLAMB",
    "PerRound",
    "ResNet18",
    "Round",
    "Run",
    "Schedule",
    "SettingError",
    "StepDecay",
    "Sweep",
    "Task",
    "Tree",
    "ViT",
    "accuracy",
    "by_value",
    "classes",
    "digits",
    "dirichlet",
    "fit",
    "from_flower",
    "hold_out",
    "iid",
    "load_dataset",
    "mlp",
    "shards",
    "sweep",
]
