"""Generate docs/recipes.md from the recipes: summaries, sizes and default gates."""

from collections.abc import Iterable, Iterator

from ablate.experiments.design.gate import show
from ablate.experiments.design.listings import RecipePublic, public_recipes
from ablate.model.blocks import BLOCKS
from ablate.service.cli.commands.catalog.recipes import layers, meant_for

_HEAD = """\
# Recipes

This page lists the recipes. `make docs` generates it from `experiments/design/recipes.py`.
`ablate catalog recipes` prints the list, `ablate catalog recipes NAME` all values of one recipe.

A recipe is a model, its data and its optimiser under a name and a version. A spec names a recipe under
`workload.recipe`, changes its values for all arms under `workload.overrides` or for one variant under
`variants.NAME.overrides` ([list](spec.md#overrides)), and switches gates per arm. A metric compares only arms of equal
work ([quality.md](quality.md#what-must-be-equal)).
"""
_BLOCKS_HEAD = """
## Blocks

A pattern has one letter for each residual block.
"""
_BLOCKS = """
- **A** can share heads of keys and values between heads of queries (`num_kv_heads`), norm its heads (`qk_norm`), see
  the last tokens only (`window`), cap its scores (`softcap`), and make keys and values of one narrow vector a token
  (`latent_rank`). On a GPU `flash`, `fa4` and `flex` take a window, `fa4` also caps scores, both with heads of 64
  or 128 numbers: nobody has compared their results with float64 for other heads. `sdpa` takes all. Tensor parallel
  divides heads of keys, too, and refuses latent attention.
- **E** drops no token. Its router computes in float32. An expert is two matrices with a squared positive part between
  them. Receipts have the load of the last timed step as facts: `experts.load` (busiest expert, in units of the mean),
  `experts.entropy` (1 is even) and `experts.dropped` (0). Published speeds of such models force an even load: the
  gate [`routing`](gates.md#routing) with value `balanced` measures that, and trains no model. The auxiliary loss acts
  by its gradient and is in no reported loss. Muon is refused. On several devices `fsdp` gathers the experts of a block
  like its other matrices, tensor parallel divides the columns of each, and the gate
  [`expert_parallel`](gates.md#expert_parallel) keeps each on one device, to which its tokens travel
  ([devices.md](devices.md#which-way-to-divide)).
- **R** is serial, because its state passes through a tanh at every token. The gate [`recurrence`](gates.md#recurrence)
  chooses a loop in torch's operations, for any device, or on a GPU one kernel a pass (`fused`), for states of 32, 64 or
  128 by 8 or 16 numbers. For four rows of 4,096 tokens and the 44 heads of `nam56r` both passes take 12.1 ms on an
  H200, by the loop 2.9 to 3.9 s; for one row of 16,384 tokens 26.2 ms
  ([receipt](receipts/2026-11-30-recurrence-h200/README.md)).

## NAM56R

The letters, widths and numbers of heads of `nam56r` are published, and so are 4.73 B parameters, of which a token
uses 3.03 B. The difference of the two fits experts of two matrices (1.696 B against 1.70 B), not of three. The rest
does not fit: the published geometry gives 4.519 B (-4.5 %) and 2.823 B (-6.8 %) here. The nearest reading is
`d_state: 128`, which the published runs had and the published recipe has not: 4.711 B (-0.4 %) and 3.016 B (-0.5 %).
With `latent_rank: 64` in place of shared heads both are smaller (4.480 B and 2.785 B). The published runs had sparse
attention in 9 of 13 blocks, which Ablate has not.

`nam56r-quarter` has the first 13 of the 52 blocks, `AEMEAEMEAEMRA`, because the published rule repeats the pattern to
a depth. The published speed is 289 TFLOP/s on each of 8 H200 in bf16, 29 % of the peak, with exchanges and with R.

<!-- not run: needs an H200 -->
```
python -m tests.bench.step --out step.jsonl --recipe nam56r-quarter --rows 4 --documents 4096 \\
    --set compile=true,routing=balanced --set compile=true,routing=learned
```

Here one H200 does 439 TFLOP/s with an even load and 435 with the learned one (model FLOPs, 44 % of the peak; useful
FLOPs: 404 and 400), which are 78,300 and 77,500 tokens/s in 50.0 GiB. That is one GPU without exchanges, so it is not
a race against the published eight. With a mixer in place of R it is 467 TFLOP/s, even load. R takes about 12 of 209 ms,
a mixer 5. These are single runs of 2026-11-30
([receipt](receipts/2026-11-30-recurrence-h200/README.md)). Before the sum over experts changed, that day, the pattern
with a mixer reached 415 ([receipt](receipts/2026-11-30-short-runs-h200x2/README.md)).

NAM52 has no published geometry and is refused.
"""
_GATES = """
## Gates

The table shows a gate's value in arms that do not name it. Variants inherit the gates of the baseline. An override of
`micro_batch` applies where no arm names that gate. [gates.md](gates.md) and `ablate catalog gates --recipe NAME`
describe the gates and the node classes that run their values.
"""


def recipes_page() -> str:
    """Return the page."""
    rows = [row for row in public_recipes() if row.sizes is not None]  # without those of installed packages
    names = [f"`{row.name}`" for row in rows]
    summaries = ((f"`{row.name}`", str(row.version), meant_for(row), row.summary) for row in rows)
    return "".join(
        [
            f"{_HEAD}\n{_table(('recipe', 'version', 'runs on', 'summary'), summaries)}",
            f"\n## Sizes\n\n{_table(('', *names), _sizes(rows))}",
            f"{_BLOCKS_HEAD}\n{_table(('letter', 'block', 'refused'), _blocks())}{_BLOCKS}",
            f"{_GATES}\n{_table(('gate', *names), _gates(rows))}",
        ]
    )


def _sizes(rows: list[RecipePublic]) -> Iterator[tuple[str, ...]]:
    sizes = [row.sizes for row in rows if row.sizes is not None]
    yield "layers", *map(layers, rows)
    yield "`d_model`", *(f"{one.d_model:,}" for one in sizes)
    yield "parameters", *(f"{one.parameters:,}" for one in sizes)
    yield "parameters that a token uses", *(f"{one.active_parameters:,}" for one in sizes)
    yield "tokens per step", *(f"{one.tokens_per_step:,}" for one in sizes)


def _blocks() -> Iterator[tuple[str, ...]]:
    for letter, kind in BLOCKS.items():
        refused = {
            "`tensor_parallel` and `context_parallel`": kind.shares is None,
            "projections in float8": kind.widths is None,
            "lane xla": not kind.on_xla,
        }
        yield f"`{letter}`", kind.name, ", ".join(name for name, is_refused in refused.items() if is_refused)


def _gates(rows: list[RecipePublic]) -> Iterator[tuple[str, ...]]:
    for name in rows[0].gates:
        yield f"[`{name}`](gates.md#{name})", *(f"`{show(row.gates[name])}`" for row in rows)


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    head, *lines = (f"| {' | '.join(line)} |\n" for line in (columns, *rows))
    return "".join((head, "|---" * len(columns), "|\n", *lines))
