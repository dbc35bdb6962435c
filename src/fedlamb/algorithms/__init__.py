"""The six methods, one file each, and the table from name to class."""

from typing import Any

from .adp_fed import AdpFed
from .fed_ams import FedAMS
from .fed_lamb import FedLAMB
from .fed_sgd import FedSGD
from .mime import Mime
from .mime_lamb import MimeLAMB

ALGORITHMS: dict[str, type[Any]] = {
    "fed-sgd": FedSGD,
    "adp-fed": AdpFed,
    "fed-ams": FedAMS,
    "fed-lamb": FedLAMB,
    "mime": Mime,
    "mime-lamb": MimeLAMB,
}
"""Name on the command line -> class."""

__all__ = ["ALGORITHMS", "AdpFed", "FedAMS", "FedLAMB", "FedSGD", "Mime", "MimeLAMB"]
