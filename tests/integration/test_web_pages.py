"""What the pages hold, on both databases: hostile text, names, live parts; and the command that opens them."""

import hashlib
import html
import json
import re
import webbrowser
from pathlib import Path

import pytest
from sqlalchemy import update

from ablate.experiments.analysis.verdicts import Verdict
from ablate.experiments.records.code_archive import pack_code
from ablate.experiments.reporting.verdict_layout import short_answer
from ablate.service.lifecycle import PROJECTIONS, OutboxKind
from ablate.service.principals import SERVICE
from ablate.service.store import outbox
from ablate.service.store.ablations.results import store_projection
from ablate.service.store.tables import ablations, blocks
from ablate.service.web import live_curves
from ablate.service.web.answers import read_answer
from tests import answering, web_world
from tests.api_stack import Api, api_fixture, nobody_url, served_api
from tests.cli import ablate, speaking_to
from tests.factories import command_values, spec_values
from tests.views import HOSTILE
from tests.web_pages import Person

SHOUTED = ("<script>alert", "<img src", "onerror=alert(2)>")


api = api_fixture(scope="module")


def test_text_from_elsewhere_stays_text(api: Api) -> None:
    node = api.register("node-a")
    made = api.submit(ablation="hostile", question=HOSTILE)["id"]
    block = api.claimed(node)
    trial = block["trials"][0]
    logs = [{"trial_id": trial["trial_id"], "offset": 0, "text": HOSTILE}]
    why = {"failure_class": "user_error", "arm": trial["arm"], "message": HOSTILE}
    assert api.attempt(block, "report", logs=logs, **why).status_code == 200
    act = "/v1/nodes/node-a:quarantine"
    assert api.client.post(act, headers=api.admin, json={"reason": HOSTILE}).status_code == 200
    person = Person.signed_in(api, operate=True)
    for path in ("/", "/live", f"/a/{made}", f"/a/{made}/live"):
        text = person.get(path).text
        assert [word for word in SHOUTED if word in text] == [], path
        assert "&lt;script&gt;alert(1)" in text, path
    api.client.post("/v1/nodes/node-a:resume", headers=api.admin)
    api.finish(node, ablation="hostile", question=HOSTILE)
    web_world.settle(api)
    page = person.get(f"/a/{made}").text
    assert [word for word in SHOUTED if word in page] == []
    assert page.count("<main") == page.count("</main>") == 1
    assert "How to reproduce it" in page, "all of the report"
    assert "{{ 7 }}" in page, "nothing is a template twice"


def test_an_end_without_a_block_says_why_first_and_that_its_report_is_being_written(api: Api) -> None:
    node, person = api.register("breaker"), Person.signed_in(api)
    made = api.submit(ablation="all-broke", limits={"priority": 100})["id"]
    block = api.claimed(node)
    assert block["ablation_id"] == made
    assert api.attempt(block, "report", failure_class="user_error", message="no such <file>").status_code == 200
    being_written = "its report is being written"
    assert being_written in person.get(f"/a/{made}").text
    web_world.settle(api)
    page = person.get(f"/a/{made}").text
    lead, why = page.index('<p class="lead">'), page.index("Failed: no block counted, 1 failed; the first: ")
    assert 0 < why - lead < 40, "it is the first line"
    assert "no such &lt;file&gt;" in page[why : why + 200]
    assert being_written not in page


def test_an_address_takes_what_people_call_an_ablation(api: Api) -> None:
    first, second, other = (api.submit(ablation=name)["id"] for name in ("many-names", "many-names", "many-others"))
    person = Person.signed_in(api)
    leads = {"many-names": second, "many-n": second, "many-o": other, "latest": other, first: None}
    for called, meant in leads.items():
        answer = person.get(f"/a/{called}")
        assert answer.headers.get("location") == (meant and f"/a/{meant}")
    with api.store.write() as connection:
        connection.execute(update(ablations).where(ablations.c.id == other).values(submitted_by=SERVICE))
    assert person.get("/a/latest").headers["location"] == f"/a/{second}", "sentinels are nobody's latest"
    refused = person.get("/a/many")
    assert (refused.status_code, "many-names, many-others" in refused.text) == (409, True)
    assert person.get("/a/nobody").status_code == 404
    assert person.get(f"/a/abl_{'0' * 26}/live").status_code == 404


def test_what_runs_is_drawn_and_the_time_left_is_told(api: Api) -> None:
    for one in api.get("/v1/nodes").json()["items"]:  # blocks that wait are shared out to every node that works
        web_world.act(api, one["name"], "drain")
    node = api.register("node-b")
    made = api.submit(ablation="runs", limits={"priority": 99})["id"]
    web_world.report(api, api.claimed(node), node, ablation="runs", limits={"priority": 99})
    block = api.claimed(node)
    web_world.beat(api, block, range(1, 6))
    web_world.let_time_pass(api)
    assert api.get(f"/v1/ablations/{made}").json()["time_left_s"] == pytest.approx(5 * web_world.BLOCK_S, abs=25)
    text = Person.signed_in(api).get(f"/a/{made}/live").text
    assert "step 5 of 40" in text
    assert text.count("Thick line: block 2, in the attempt that runs") == 2, "loss and throughput of the running trial"
    assert text.count("Thin line: mean over 1 finished block.") == 2
    assert "about 8\N{NO-BREAK SPACE}min left" in text
    assert "block 2 on node-b" in text
    why = {"failure_class": "preempted", "arm": block["trials"][0]["arm"], "message": "wanted elsewhere"}
    assert api.attempt(block, "report", **why).status_code == 200
    with api.store.write() as connection:
        connection.execute(update(blocks).where(blocks.c.ablation_id == made).values(not_before=0))
    again = api.claimed(node)
    assert (again["ablation_id"], again["block_index"]) == (made, block["block_index"])
    web_world.beat(api, again, range(1, 3))
    live_curves.live_curves.cache.clear()
    text = Person.signed_in(api).get(f"/a/{made}/live").text
    assert "step 2 of 40" in text
    assert "Thin line" in text
    assert "Thick line" not in text, "one point of the second attempt, and none of the first"


def test_a_list_and_one_ablation_say_the_answer_of_the_page(api: Api) -> None:
    node, spec = api.register("node-d"), {"ablation": "answered", "limits": {"priority": 100}}
    made = api.submit(**spec)["id"]

    def listed_and_shown() -> list[str | None]:
        rows = {row["id"]: row["answer"] for row in api.get("/v1/ablations?limit=500").json()["items"]}
        return [rows[made], api.get(f"/v1/ablations/{made}").json()["answer"]]

    for index in range(6):
        assert listed_and_shown() == [None, None]
        web_world.report(api, api.claimed(node), node, changed=web_world.speeds(index), **spec)
    web_world.settle(api)
    verdict = Verdict.model_validate(api.get(f"/v1/ablations/{made}/verdict").json())
    assert listed_and_shown() == [short_answer(verdict)] * 2
    best = read_answer(verdict.model_dump_json()).variants[0]
    assert short_answer(verdict).startswith(f"{best.arm} {best.word.text}, ")
    assert best.headline in html.unescape(Person.signed_in(api).get("/").text)


def test_the_latest_answers_are_those_that_ended_last(api: Api) -> None:
    made = {name: api.submit(ablation=f"ends-{name}")["id"] for name in ("third", "first", "second")}
    for name in ("first", "second", "third"):
        assert api.client.post(f"/v1/ablations/{made[name]}:cancel", headers=api.admin).status_code < 300
    answers = Person.signed_in(api).get("/?show=failed&q=ENDS-").text.partition('id="answers"')[2]
    assert re.findall(r">ends-(\w+)<", answers) == ["third", "second", "first"]


def test_the_link_to_mlflow_opens_the_ablations_of_the_newest_that_it_shows(api: Api) -> None:
    person, base = Person.signed_in(api), f'href="{nobody_url()}/#/experiments'
    training = 'workflowType=machine_learning"'
    assert 'href="/mlflow-ablations"' in person.get("/nodes").text, "one navigation on every page"

    def address() -> str:
        return f'href="{person.get("/mlflow-ablations").headers["location"]}"'

    assert address() == f"{base}?{training}"
    for experiment in ("41", "7"):
        made = api.submit(ablation="shown-in-mlflow")["id"]
        with api.store.write() as connection:
            store_projection(connection, made, experiment_id=experiment, run_id="r", whole=False)
        api.submit(ablation="not-yet-shown")
        assert address() == f"{base}/{experiment}/runs?viewStateShareKey=ablations&{training}"


@pytest.mark.parametrize(("path", "allowed"), [("hybrid-tin/loss", "hybrid-tiny"), ("hybrid-tiny/psiv", "psiv_cache")])
def test_a_history_that_there_cannot_be_names_those_that_there_are(api: Api, path: str, allowed: str) -> None:
    refused = Person.signed_in(api).get(f"/history/{path}")
    assert (refused.status_code, allowed in refused.text) == (422, True)


def test_the_history_of_a_gate_holds_the_variants_that_change_it(api: Api) -> None:
    node = api.register("node-c")
    both = {"psiv_cache": True, "chunk_size": 32}
    asked = {
        "ablation": "two-at-once",
        "variants": {"both": {"gates": both}, "chunk-64": {"gates": {"chunk_size": 64}}},
    }
    assert spec_values(**asked)["baseline"]["gates"] == {"chunk_size": 16}
    made = api.submit(**asked, limits={"priority": 100})["id"]
    for _ in range(6):
        web_world.report(api, api.claimed(node), node, **asked, limits={"priority": 100})
    web_world.settle(api)
    person = Person.signed_in(api)
    cache, chunks = (person.get(f"/history/hybrid-tiny/{gate}").text for gate in ("psiv_cache", "chunk_size"))
    assert f'<a href="/a/{made}">two-at-once</a>' in cache
    assert "with chunk_size 32" in cache
    assert "chunk-64" not in cache
    assert {"16 to 32", "16 to 64"} <= {word for word in ("16 to 32", "16 to 64", "16 to 128") if word in chunks}


def test_the_command_signs_a_browser_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    with served_api("sqlite", tmp_path) as api, speaking_to(api, monkeypatch):
        url, made = str(api.client.base_url), api.submit()["id"]
        for words, scope in ((["latest"], "read"), (["--operate", "--print"], "operate")):
            done = ablate("open", *words)
            assert done.code == 0, done.err
            page = api.client.get(done.out.strip())
            assert "Sign in as admin" in page.text
            assert ("read and operate" in page.text) == (scope == "operate")
            assert (f'action="/sign-in?to=/a/{made}"' in page.text) == (scope == "read")
        assert len(opened) == 1, "not with --print"
        api.submit(ablation="night-1")
        opening = api.client.post("/v1/sessions/night:open", headers=api.admin, json=spec_values(ablation="night-2"))
        assert opening.status_code == 201, opening.text
        page = api.client.get(ablate("open", "--print", "night").out.strip())
        assert 'action="/sign-in?to=/sessions/night"' in page.text
        missing = ablate("open", "--print", "unheard-of")
        assert (missing.code, missing.out) == (5, "")
        assert "no ablation whose name or id begins with 'unheard-of'" in " ".join(missing.err.split())
        link = json.loads(ablate("open", "--json").out)
        assert (link["scope"], link["lasts_s"], link["url"].startswith(f"{url}/sign-in?link=")) == ("read", 120, True)


def test_a_failed_projection_is_told_on_the_ablations_page(api: Api) -> None:
    ablation, error = api.submit()["id"], "ProjectionError: MLflow at http://mlflow:8322: nothing listens there"
    shown = Person.signed_in(api)
    assert "Not written to MLflow yet" not in shown.get(f"/a/{ablation}").text
    with api.store.write() as connection:
        outbox.add(connection, OutboxKind.ANNOUNCE, ablation)
        rows = outbox.take(connection, PROJECTIONS, ablation, hold_s=10)
        outbox.retry(connection, [row.id for row in rows], delay_s=60, error=error)
    assert f"Not written to MLflow yet: {error}" in shown.get(f"/a/{ablation}").text
    with api.store.write() as connection:
        outbox.done(connection, [row.id for row in rows])
    assert "Not written to MLflow yet" not in shown.get(f"/a/{ablation}").text


def test_the_first_page_filters_and_searches_its_table(api: Api) -> None:
    node, person = api.register("filters"), Person.signed_in(api)
    spec = {"ablation": "fast-one", "question": "Is it 50%_faster?", "labels": {"note": "a Bold idea"}}
    made = api.submit(**spec, limits={"priority": 100})["id"]
    for index in range(6):
        block = api.claimed(node)
        web_world.report(api, block, node, changed=web_world.speeds(index), **spec, limits={"priority": 100})
    web_world.settle(api)

    def found(query: str) -> bool:
        return (
            f'href="/a/{made}"' in person.get(f"/?{query}").text.partition('id="answers"')[2].partition('id="queue"')[0]
        )

    words = [
        "q=50%25_FASTER",
        "q=fast-one",
        "q=bold",
        "q=IDEA+one+50%25_+is",
        "q=%20bold%20%20idea%20",
        "show=all",
        "show=inconclusive",
        "q=psiv-on",
        "show=all&q=",
    ]
    assert [query for query in words if not found(query)] == []
    others = [
        "q=50%25-",
        "q=slow",
        "q=bold+slow",
        "q=bold+%25%25",
        "show=better",
        "show=failed",
        "show=running",
        "show=inconclusive&q=slow",
    ]
    assert [query for query in others if found(query)] == []
    assert person.get("/?show=everything").status_code == 422
    assert "?show=inconclusive&amp;q=bold%20idea" in person.get("/?show=inconclusive&q=bold%20idea").text, "live, too"
    assert "No ablation matches" in person.get("/?q=slow").text


def test_an_empty_start_shows_three_commands(tmp_path: Path) -> None:
    with served_api("sqlite", tmp_path) as api:
        page = html.unescape(Person.signed_in(api).get("/").text)
    commands = ["ablate run demo", "ablate check -- python train.py", "ablate ask --vs='--lr 2e-3' -- python train.py"]
    assert [command for command in commands if command not in page] == []
    assert "Filter" not in page


def test_changed_code_is_shown_to_those_who_may_use_it(api: Api, tmp_path: Path) -> None:
    digests = []
    for number, text in enumerate(("w = w - g\n", "w = w - clip(g) < 1\n")):
        folder = tmp_path / f"code{number}"
        folder.mkdir()
        (folder / "train.py").write_text(text, encoding="utf-8")
        content = b"".join(pack_code(folder).pieces())
        digests.append(f"sha256:{hashlib.sha256(content).hexdigest()}")
        headers = {**api.token(f"sender-{number}", "code"), "Content-Type": "application/gzip"}
        for who in ({**api.admin, "Content-Type": "application/gzip"}, headers):
            path, options = "/v1/code:upload", {"params": {"digest": digests[-1]}, "content": content}
            assert api.client.post(path, headers=who, **options).is_success
    base, own = ({"archive": digest} for digest in digests)
    values = command_values(workload__code=base, variants={"proposal": {"code": own}}, labels={"note": "clip <b>"})
    made = api.post_spec(values).json()["id"]
    page = Person.signed_in(api, operate=True).get(f"/a/{made}").text
    assert "clip &lt;b&gt;" in page, "the note of the variant"
    assert '<span class="added">+w = w - clip(g) &lt; 1\n</span>' in page
    assert '<span class="removed">-w = w - g\n</span>' in page
    for who in ("reader", "sender"):
        headers = api.token(f"other-{who}", "read" if who == "reader" else "code")
        other = Person.signed_in(api, headers).get(f"/a/{made}").text
        assert "What changed" in other
        assert "clip(g)" not in other
        assert digests[0] not in other
    assert f'href="/a/{made}"' in Person.signed_in(api).get("/?q=CLIP").text


def test_a_session_shows_the_change_and_the_note_of_each_proposal(api: Api) -> None:
    node = api.register("tries")
    exact = {"metric": "peak_allocated_gib", "margin": "0%", "adopt_if": "1%"}
    one = {"psiv-on": {"gates": {"psiv_cache": True}}}
    values = spec_values(variants=one, verdict__primary=exact, design__seeds=[1], limits={"priority": 100})
    assert api.client.post("/v1/sessions/lab:open", headers=api.admin, json=values).status_code == 201
    headers = {**api.admin, "Idempotency-Key": "lab-1"}
    tried = api.client.post("/v1/sessions/lab:try", headers=headers, json={**values, "labels": {"note": "cache <it>"}})
    assert tried.status_code == 202, tried.text
    while block := api.claim(node):
        answering.report(api, block, node, {})
    web_world.settle(api)
    page = Person.signed_in(api).get("/sessions/lab").text
    row = html.unescape(re.sub(r"<[^>]+>|\s+", " ", page.partition("<tbody>")[2].partition("</tbody>")[0]))
    assert "psiv_cache true" in row
    assert "(cache <it>)" in row
    assert "discard " in row
    assert "same" in row
    assert " ago" in row


def test_askings_of_one_question_name_each_other_and_other_questions_do_not(api: Api) -> None:
    node, person = api.register("asks"), Person.signed_in(api)
    spec = {"variants": {"chunk-64": {"gates": {"chunk_size": 64}}}, "limits": {"priority": 100}}
    other = {**spec, "ablation": "asks-else", "variants": {"chunk-128": {"gates": {"chunk_size": 128}}}}
    made = []
    for own in ({**spec, "ablation": "asks-first"}, {**spec, "ablation": "asks-again"}, other):
        made.append(api.submit(**own)["id"])
        for _ in range(6):
            web_world.report(api, api.claimed(node), node, **own)
        web_world.settle(api)
    waiting = api.submit(**{**spec, "ablation": "asks-cancelled"})["id"]
    assert api.client.post(f"/v1/ablations/{waiting}:cancel", headers=api.admin).status_code < 300
    first, again, apart = (person.get(f"/a/{one}").text.partition('class="askings"')[2][:600] for one in made)
    answer = html.unescape(api.get(f"/v1/ablations/{made[0]}").json()["answer"])
    assert f'<a href="/a/{made[1]}">asks-again</a> (later, ' in first
    assert f'<a href="/a/{made[0]}">asks-first</a> (earlier, ' in again
    assert answer in html.unescape(again)
    assert "asks-cancelled" not in first + again, "nobody saw a result"
    assert (apart, "asks-else" in first + again) == ("", False)


def test_the_report_is_one_file_to_take_along(api: Api) -> None:
    node, person = api.register("keeps"), Person.signed_in(api)
    spec = {"ablation": "kept", "limits": {"priority": 100}}
    made = api.submit(**spec)["id"]
    assert "report.html" not in person.get(f"/a/{made}").text
    assert person.get(f"/a/{made}/report.html").status_code == 404
    for _ in range(6):
        web_world.report(api, api.claimed(node), node, **spec)
    web_world.settle(api)
    assert f'<a href="/a/{made}/report.html" download>' in person.get(f"/a/{made}").text
    file = person.get(f"/a/{made}/report.html")
    assert file.headers["Content-Disposition"] == f'attachment; filename="{made}.html"'
    assert file.text == api.get(f"/v1/ablations/{made}/report").text
    assert Person(api).get(f"/a/{made}/report.html").status_code in {303, 401, 403}


def test_the_table_shows_the_value_before_a_change_and_what_waits(api: Api) -> None:
    for one in api.get("/v1/nodes").json()["items"]:
        web_world.act(api, one["name"], "drain")
    spec = {"ablation": "before-and-after", "limits": {"priority": 100}}
    person, node, made = Person.signed_in(api), api.register("waits"), api.submit(**spec)["id"]

    def state() -> str:
        row = person.get("/?q=after+before").text.partition(f'href="/a/{made}"')[2].partition("</tbody>")[0]
        return re.findall(r'class="badge [a-z]+">(\w+)<', row)[0]

    assert state() == "queued"
    block = api.claimed(node)
    assert state() == "running"
    web_world.report(api, block, node, **spec)
    assert state() == "waiting", "no block of it runs now"
    row = person.get("/?q=before-and-after").text
    assert "psiv_cache false \N{RIGHTWARDS ARROW} true" in row, "its spec leaves the value before to the recipe"
