"""The most processes of a trial on a node without a service: what ABLATE_TRIAL_PROCESSES may say."""

import pytest

from ablate.workers.environment_variables import trial_processes


@pytest.mark.parametrize(("text", "number"), [(None, 1024), ("", 1024), (" 8 ", 8), ("4194303", 4194303)])
def test_a_number_of_processes_is_read(text: str | None, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ABLATE_TRIAL_PROCESSES", raising=False)
    if text is not None:
        monkeypatch.setenv("ABLATE_TRIAL_PROCESSES", text)
    assert trial_processes(1024) == number


@pytest.mark.parametrize("text", ["0", "-1", "1e3", "many", "4194304", "1.5", "\u0661"])
def test_another_text_is_refused_with_what_is_allowed(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ABLATE_TRIAL_PROCESSES", text)
    with pytest.raises(ValueError, match=r"ABLATE_TRIAL_PROCESSES is '.*'; allowed: 1 to 4194303"):
        trial_processes(1024)
