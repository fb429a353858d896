"""Ask a question with the client that openapi-generator generates: `PROGRAM ADDRESS TOKEN OWNER`."""

import json
import sys
import time
import uuid

from ablate_ogp import (
    AblationsApi,
    AblationSpec,
    ApiClient,
    Blocks,
    CatalogueApi,
    Configuration,
    Design,
    DesignBlocks,
    Event,
    Placement,
    Primary,
    Seeds,
    SubmissionsApi,
    VariantGates,
    VariantSpec,
    Verdict,
    VerdictRule,
    Workload,
)
from ablate_ogp.exceptions import ApiException, ConflictException, UnprocessableEntityException

NAME, PATIENCE_S = "asked-by-openapi-generator", 60


def spec(metric: str) -> AblationSpec:
    return AblationSpec(
        ablation=NAME,
        question="Does caching PsiV save memory?",
        workload=Workload(recipe="hybrid-tiny"),
        variants={"psiv-on": VariantSpec(gates=VariantGates(psiv_cache=True))},
        design=Design(seeds=Seeds([1]), blocks=DesignBlocks(Blocks(count=2))),
        placement=Placement(node_class="cpu"),
        verdict=VerdictRule(primary=Primary(metric=metric, margin="1%")),
    )


def verdict_of(api: AblationsApi, ablation_id: str) -> Verdict:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return api.get_verdict(ablation_id)
        except ConflictException:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def main(address: str, token: str, owner: str) -> None:
    with ApiClient(Configuration(host=address, access_token=token)) as client:
        submissions, ablations = SubmissionsApi(client), AblationsApi(client)
        try:
            submissions.submit_ablation(str(uuid.uuid4()), spec("no_such_metric"))
        except UnprocessableEntityException as error:
            refused: ApiException = error
        accepted = submissions.submit_ablation(str(uuid.uuid4()), spec("peak_allocated_gib"))
        verdict = verdict_of(ablations, accepted.id)
        listed = ablations.list_ablations(name=NAME, owner=owner)
        stream = ablations.stream_events_without_preload_content(accepted.id).read().decode()
        lines = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: ")]
        events = [Event.from_json(line) for line in lines]
        answer = {
            "id": accepted.id,
            "refused": [one["pointer"] for one in json.loads(refused.body)["errors"]],
            "listed": [one.id for one in listed.items],
            "recipes": [one.name for one in CatalogueApi(client).list_recipes()],
            "words": {one.arm: one.verdict for one in verdict.variants},
            "ran": sorted({(one.block_index, one.arm) for one in events if one.kind.to_dict() == "trial.state"}),
        }
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
