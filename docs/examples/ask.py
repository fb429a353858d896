"""Ask whether a smaller chunk saves memory, wait for the answer, and look at the numbers behind it.

A notebook in cells: editors run them one by one, `python docs/examples/ask.py` runs them all.
"""

# %% The service: ABLATE_URL and ABLATE_TOKEN, or the stack that runs here (`ablate up`)
from ablate.service.client.api import Client, Refused

client = Client()

# %% The question. A mapping, or the path of a spec file
question = {
    "ablation": "notebook",
    "question": "Does a smaller chunk save memory?",
    "workload": {"recipe": "hybrid-tiny", "steps": {"warmup": 1, "warmup_s": 0, "timed": 4, "val_rows": 2}},
    "baseline": {"gates": {"chunk_size": 32}},
    "variants": {"chunk-16": {"gates": {"chunk_size": 16}}},
    "design": {"blocks": {"count": 2}, "order_seed": 7},
    "placement": {"node_class": "cpu"},
    "verdict": {"primary": {"metric": "peak_allocated_gib", "margin": "1%"}},
}

# %% What would run, and what is wrong with a spec: every problem at once
plan = client.ablations.plan(question)
print(f"{len(plan.blocks)} blocks of {', '.join(arm.name for arm in plan.arms)}")
try:
    client.ablations.plan({**question, "variants": {"a": {"gates": {"chunk_siz": 16}}}, "seed": 1})
except Refused as refusal:
    print(refusal)

# %% Ask, and wait
asked = client.ablations.submit(question)
row = client.ablations.wait(asked.id, timeout_s=1800)
print(row.name, row.state, row.mlflow_url)

# %% The answer
verdict = client.ablations.verdict(row.id)
for variant in verdict.variants:
    print(variant.arm, variant.verdict, variant.decision, variant.reason)

# %% The numbers behind it: a receipt for every trial, which anyone can check again
trials = list(client.ablations.trials(row.id))
receipts = [client.trials.receipt(trial.id) for trial in trials]
for receipt in receipts:
    print(receipt.arm, receipt.ids.trial, receipt.memory.peak_allocated_bytes)

# %%
client.close()
