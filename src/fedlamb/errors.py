"""The one error a user meets: which setting, which value, and what would be right."""

from collections.abc import Iterable
from difflib import get_close_matches


class SettingError(ValueError):
    """A setting, an argument or a file that cannot be used; the message is one sentence."""

    def __init__(self, setting: str, value: object, right: str) -> None:
        super().__init__(f"{setting} = {_short(value)}: {right}")
        self.setting = setting


def unknown_name(setting: str, value: object, known: Iterable[str]) -> SettingError:
    """The error for a name that is not in a table; suggests the nearest one."""
    names = list(known)
    near = get_close_matches(str(value), names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return SettingError(setting, value, f"{hint}known are {', '.join(names)}")


def _short(value: object, limit: int = 80) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
