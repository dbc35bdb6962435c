"""Layer-wise adaptive federated learning: Fed-LAMB, Mime-LAMB and the methods beside them."""

from .algorithm import Algorithm, GradAt, Kept
from .algorithms import ALGORITHMS, AdpFed, FedAMS, FedLAMB, FedSGD, Mime, MimeLAMB
from .errors import SettingError
from .schedules import Schedule, StepDecay
from .simulate.fit import Round, Run, fit
from .tasks.datasets import digits
from .tasks.models import mlp
from .tasks.partition import by_value, classes, dirichlet, hold_out, iid, shards
from .tasks.task import Task, accuracy
from .trees import Tree

__version__ = "0.1.0"

__all__ = [
    "ALGORITHMS",
    "AdpFed",
    "Algorithm",
    "FedAMS",
    "FedLAMB",
    "FedSGD",
    "GradAt",
    "Kept",
    "Mime",
    "MimeLAMB",
    "Round",
    "Run",
    "Schedule",
    "SettingError",
    "StepDecay",
    "Task",
    "Tree",
    "accuracy",
    "by_value",
    "classes",
    "digits",
    "dirichlet",
    "fit",
    "hold_out",
    "iid",
    "mlp",
    "shards",
]
