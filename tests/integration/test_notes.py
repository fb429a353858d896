"""Messages of `ablate nightly` by apprise, to a real web server and a real mail server."""

import pytest

from ablate.experiments.errors import SpecError
from ablate.service.cli.commits.nights import NightChange
from ablate.service.cli.commits.notes import Note, picture_of, receiver, send, shown
from tests.integration.test_notifications import mail_server
from tests.receiver import receiving


def test_a_message_goes_out_with_its_picture_and_says_why_if_it_does_not() -> None:
    changes = [(str(number), NightChange(change_pct=-number, low_pct=-number - 1, high_pct=0)) for number in range(60)]
    note = Note(title="a/main: worse", text="é +2 %\n<b>http://x/a/1</b>", picture=picture_of(changes, "$x$ of a_b"))
    with receiving() as web, mail_server() as mail:
        to = receiver(web.url.replace("http://", "json://ada:hunter2@"))
        assert "hunter2" not in shown(to)
        web.statuses = [302]
        assert "302" in (send(note, to) or "")
        assert send(note, to) is None
        letters = f"mailto://127.0.0.1:{mail.server_address[1]}?from=a@b.example&to=ada@b.example&mode=insecure"
        assert send(note, receiver(letters)) is None
    assert len(web.got) == 2
    assert "image/png" in mail.mails[0]
    assert send(note, receiver(letters)) is not None


@pytest.mark.parametrize("address", ["nothing", "bogus://secret", "json://"])
def test_an_address_that_apprise_does_not_know_is_refused_without_showing_it(address: str) -> None:
    with pytest.raises(SpecError) as refusal:
        receiver(address)
    assert "secret" not in str(refusal.value.problems)
