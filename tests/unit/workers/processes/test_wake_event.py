import os

from ablate.workers.processes import wake_event
from ablate.workers.processes.wake_event import WakeEvent


def old(path):
    os.utime(path, (0, 0))
    return path


def test_a_wait_touches_the_health_check_file(tmp_path, monkeypatch):
    alive = tmp_path / "home" / "alive"
    event = WakeEvent(alive)
    assert not alive.exists()
    event.wait(0)
    assert alive.exists()
    event.wait(0)
    assert old(alive).stat().st_mtime == 0, "seldom: a wait may last for milliseconds"
    event.wait(0)
    assert alive.stat().st_mtime == 0
    monkeypatch.setattr(wake_event, "_TOUCH_EVERY_S", -1.0)
    WakeEvent(alive).wait(0)
    assert alive.stat().st_mtime > 0


def test_a_wait_goes_on_where_the_file_cannot_be_written(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    event = WakeEvent(blocked / "alive")
    event.set()
    assert event.wait(0)
