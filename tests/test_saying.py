"""What is said while a run is under way."""

import pytest

from fedlamb.simulate.saying import compiling


@pytest.mark.parametrize(("rank", "spoken"), [(None, True), ("0", True), ("1", False)])
def test_what_is_compiled_is_said_before_and_after_by_one_process(
    rank: str | None,
    spoken: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    with compiling("a local step"):
        assert capsys.readouterr().err == ("fedlamb: compiling a local step …\n" if spoken else "")
    assert ("compiled a local step in 0.0 s" in capsys.readouterr().err) is spoken
