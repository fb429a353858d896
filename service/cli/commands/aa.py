"""`ablate aa`: measure the noise of a node, so that it can get verdicts about speed."""

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ablate.experiments.catalog.files import catalog_names
from ablate.experiments.design.aa_spec import ADMITTING_BLOCKS, CONTENT_TYPE, bare_spec, calibration_spec, spec_like
from ablate.experiments.design.problems import nearest
from ablate.experiments.design.spec import MIN_BLOCKS, AblationSpec
from ablate.experiments.errors import SpecError, SpecProblem
from ablate.service.cli import completion
from ablate.service.cli.arguments import ablation_id, is_spec, may_name_an_ablation, no_such_spec, read_spec
from ablate.service.cli.follow import run_spec
from ablate.service.cli.output import JsonOption, guarded, out
from ablate.service.client.api import Client
from ablate.service.client.connection import ClientError
from ablate.service.schemas.submissions import SpecBody

if TYPE_CHECKING:
    from ablate.experiments.records.code_archive import PackedCode

app = typer.Typer()

_ORDER_SEEDS = 2**32


@app.command()
@guarded
def aa(
    node_class: Annotated[
        str,
        typer.Argument(
            metavar="NODE_CLASS", help="The node class to calibrate.", autocompletion=completion.node_classes
        ),
    ],
    like: Annotated[
        str | None,
        typer.Option(metavar="SPEC", help="Calibrate for ablations like this spec or ablation."),
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="Calibrate for this recipe, instead of --like.")] = None,
    blocks: Annotated[
        int, typer.Option(min=MIN_BLOCKS, help=f"A/A blocks. {ADMITTING_BLOCKS} calibrate one key.")
    ] = ADMITTING_BLOCKS,
    print_spec: Annotated[bool, typer.Option("--print", help="Print the spec of the A/A ablation and stop.")] = False,
    out_file: Annotated[
        Path | None,
        typer.Option("--out", help="Write a plan file for `ablate offline exec` and stop. Needs no service."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure noise by comparing a baseline with itself. Without it, a verdict about speed is inconclusive.

    The command submits an A/A ablation and follows it. Ctrl-C detaches and cancels nothing. The result holds for the
    device, recipe, shape, window and software of the run.
    """
    base, archives = _base_spec(like, recipe, node_class)
    text = calibration_spec(base, node_class=node_class, blocks=blocks, order_seed=secrets.randbelow(_ORDER_SEEDS))
    body = SpecBody(content=text, content_type=CONTENT_TYPE, archives=archives)
    if print_spec:
        out().print(text.decode(), markup=False, end="")
    elif out_file is not None:
        from ablate.service.cli import offline

        offline.print_plan(offline.write_plan(body, out_file), out_file, as_json=as_json)
    else:
        run_spec(body, as_json=as_json, print_end=_print_noise)


def _print_noise(client: Client, ablation_id: str) -> None:
    """Print the noise that the A/A ablation measured. Its verdict, on two equal arms, has no meaning."""
    from ablate.service.cli.calibrations import noise_lines  # imports numpy and scipy

    for line in noise_lines(client.calibrations(), ablation_id):
        out().print(line, markup=False, highlight=False)


def _base_spec(like: str | None, recipe: str | None, node_class: str) -> "tuple[AblationSpec, tuple[PackedCode, ...]]":
    """Return the spec to calibrate for, and the archives of its code."""
    if (like is None) == (recipe is None):
        raise SpecError([SpecProblem(pointer="--like", detail="give exactly one of --like SPEC and --recipe NAME")])
    if recipe is not None:
        return bare_spec(recipe, node_class), ()
    body = _spec_of(str(like))
    return spec_like(body.content, body.content_type), body.archives


def _spec_of(like: str) -> SpecBody:
    if is_spec(like):
        return read_spec(like)
    if not may_name_an_ablation(like):
        raise SpecError([SpecProblem(pointer="--like", detail=no_such_spec(like), hint=nearest(like, catalog_names()))])
    try:
        with Client() as client:
            return client.ablations.spec(ablation_id(client, like))
    except ClientError as error:
        raise SpecError(
            [SpecProblem(pointer="--like", detail=f"{no_such_spec(like)}; as an ablation: {error}")]
        ) from error
