"""The one error a user meets: which setting, which value, and what would be right."""

from collections.abc import Iterable
from difflib import get_close_matches
from numbers import Integral
from typing import Any


class SettingError(ValueError):
    """A setting, an argument or a file that cannot be used; the message is one sentence."""

    def __init__(self, setting: str, value: object, right: str) -> None:
        super().__init__(f"{setting} = {_short(value)}: {right}")
        self.setting, self.value, self.right = setting, value, right

    def under(self, section: str) -> "SettingError":
        """The same error for a setting that lies in a section."""
        return SettingError(f"{section}.{self.setting}", self.value, self.right)


def is_whole(value: object) -> bool:
    """Whether it is a whole number, Python's or NumPy's; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def whole_number(setting: str, value: Any, least: int) -> int:
    """The value as a plain int, checked."""
    if not is_whole(value) or not least <= value < 2**63:
        raise SettingError(setting, value, f"must be a whole number from {least} on, below 2**63")
    return int(value)


def unknown_name(setting: str, value: object, known: Iterable[str]) -> SettingError:
    """The error for a name that is not in a table; suggests the nearest one."""
    names = list(known)
    text = str(value)
    near = get_close_matches(text, names, n=1) or get_close_matches(text.lower(), names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return SettingError(setting, value, f"is unknown; {hint}known are {', '.join(names)}")


def unknown_key(section: str, key: str, value: object, known: Iterable[str]) -> SettingError:
    """The error for a setting that does not exist; suggests the nearest one."""
    names = list(known)
    near = get_close_matches(key, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    where = f"[{section}]" if section else "the settings"
    name = f"{section}.{key}" if section else key
    return SettingError(
        name, value, f"is no setting; {hint}{where} {_takes(where)} {', '.join(names)}"
    )


def _takes(where: str) -> str:
    return "takes" if where.startswith("[") else "take"


def _short(value: object) -> str:
    limit = 500 if isinstance(value, str) else 80  # a file's whole name is worth its length
    text = " ".join(repr(value).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
