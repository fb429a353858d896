"""Ask a question with the client that openapi-python-client generates: `PROGRAM ADDRESS TOKEN OWNER`."""

import json
import sys
import time
import uuid

from ablate_opc import AuthenticatedClient
from ablate_opc.api.ablations import get_verdict, list_ablations, stream_events
from ablate_opc.api.catalogue import list_recipes
from ablate_opc.api.submissions import submit_ablation
from ablate_opc.models.ablation_accepted import AblationAccepted
from ablate_opc.models.ablation_spec import AblationSpec
from ablate_opc.models.ablation_spec_variants import AblationSpecVariants
from ablate_opc.models.blocks import Blocks
from ablate_opc.models.design import Design
from ablate_opc.models.event import Event
from ablate_opc.models.placement import Placement
from ablate_opc.models.placement_node_class import PlacementNodeClass
from ablate_opc.models.primary import Primary
from ablate_opc.models.problem import Problem
from ablate_opc.models.variant_spec import VariantSpec
from ablate_opc.models.variant_spec_variant_gates import VariantSpecVariantGates
from ablate_opc.models.verdict import Verdict
from ablate_opc.models.verdict_rule import VerdictRule
from ablate_opc.models.workload import Workload
from ablate_opc.models.workload_recipe import WorkloadRecipe

NAME, PATIENCE_S = "asked-by-openapi-python-client", 60


def spec(margin: str) -> AblationSpec:
    variants = AblationSpecVariants()
    variants["psiv-on"] = VariantSpec(gates=VariantSpecVariantGates(psiv_cache=True))
    return AblationSpec(
        ablation=NAME,
        question="Does caching PsiV save memory?",
        workload=Workload(recipe=WorkloadRecipe.HYBRID_TINY),
        variants=variants,
        design=Design(seeds=[1], blocks=Blocks(count=2)),
        placement=Placement(node_class=PlacementNodeClass.CPU),
        verdict=VerdictRule(primary=Primary(metric="peak_allocated_gib", margin=margin)),
    )


def main(address: str, token: str, owner: str) -> None:
    client = AuthenticatedClient(base_url=address, token=token)
    refused = submit_ablation.sync(client=client, body=spec("much"), idempotency_key=str(uuid.uuid4()))
    assert isinstance(refused, Problem), refused
    accepted = submit_ablation.sync(client=client, body=spec("1%"), idempotency_key=str(uuid.uuid4()))
    assert isinstance(accepted, AblationAccepted), accepted
    deadline = time.monotonic() + PATIENCE_S
    while isinstance(verdict := get_verdict.sync(accepted.id, client=client), Problem) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert isinstance(verdict, Verdict), verdict
    listed = list_ablations.sync(client=client, name=NAME, owner=owner)
    stream = stream_events.sync_detailed(accepted.id, client=client).content.decode()
    lines = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: ")]
    events = [Event.from_dict(json.loads(line)) for line in lines]
    answer = {
        "id": accepted.id,
        "refused": [one.pointer for one in refused.errors],
        "listed": [one.id for one in listed.items],
        "recipes": [one.name for one in list_recipes.sync(client=client)],
        "words": {one.arm: one.verdict for one in verdict.variants},
        "ran": sorted({(one.block_index, one.arm) for one in events if one.kind == "trial.state"}),
    }
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
