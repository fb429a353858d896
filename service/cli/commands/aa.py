"""`ablate aa`: measure the noise of a node, which admits it to words."""

import secrets
from pathlib import Path
from typing import Annotated

import typer

from experiments.design.aa_spec import ADMITTING_BLOCKS, CONTENT_TYPE, bare_spec, calibration_spec
from experiments.design.load import parse_spec
from experiments.design.problems import nearest
from experiments.design.spec import MIN_BLOCKS, AblationSpec
from experiments.design.spec_files import catalog_names
from experiments.errors import SpecError, SpecProblem
from service.cli import completion
from service.cli.names import ablation_id, names_an_ablation
from service.cli.output import JsonOption, guarded, out
from service.cli.spec_argument import names_a_spec, no_spec, read_spec
from service.cli.submitting import run_spec
from service.client.api import Client
from service.client.connection import ClientError
from service.schemas.submissions import SpecBody

app = typer.Typer()

_ORDER_SEEDS = 2**32


@app.command()
@guarded
def aa(
    node_class: Annotated[
        str,
        typer.Argument(
            metavar="NODE_CLASS", help="The kind of machine to calibrate.", autocompletion=completion.node_classes
        ),
    ],
    like: Annotated[
        str | None,
        typer.Option(metavar="SPEC", help="Calibrate for ablations such as this one: a spec, or an ablation."),
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="Instead of --like: this recipe as it is.")] = None,
    blocks: Annotated[
        int, typer.Option(min=MIN_BLOCKS, help=f"A/A blocks; {ADMITTING_BLOCKS} of one key admit it.")
    ] = ADMITTING_BLOCKS,
    print_spec: Annotated[bool, typer.Option("--print", help="Only print the spec of the A/A ablation.")] = False,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Write a plan file for `ablate exec` instead; needs no service.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare a baseline with itself, in blocks, to know the noise: words are published only where it is known.

    The A/A ablation is submitted and watched as any other; Ctrl-C detaches and cancels nothing. What it says holds for
    the device, recipe, shape, window and software that it ran with.
    """
    base = _like(like, recipe, node_class)
    text = calibration_spec(base, node_class=node_class, blocks=blocks, order_seed=secrets.randbelow(_ORDER_SEEDS))
    body = SpecBody(content=text, content_type=CONTENT_TYPE)
    if print_spec:
        out().print(text.decode(), markup=False, end="")
    elif out_file is not None:
        from service.cli import offline_work

        offline_work.write_plan(body, out_file, as_json=as_json)
    else:
        run_spec(body, as_json=as_json, show_end=_show_noise)


def _show_noise(client: Client, ablation_id: str) -> None:
    """Say which noise the A/A ablation found; its verdict, on two arms that are the same, says nothing."""
    from service.cli import noise  # with numpy and scipy

    for line in noise.lines(client.calibrations(), ablation_id):
        out().print(line, markup=False, highlight=False)


def _like(like: str | None, recipe: str | None, node_class: str) -> AblationSpec:
    if (like is None) == (recipe is None):
        raise SpecError([SpecProblem(pointer="--like", detail="give exactly one of --like SPEC and --recipe NAME")])
    if recipe is not None:
        return bare_spec(recipe, node_class)
    body = _spec_of(str(like))
    return parse_spec(body.content, body.content_type)


def _spec_of(like: str) -> SpecBody:
    if names_a_spec(like):
        return read_spec(like)
    if not names_an_ablation(like):
        raise SpecError([SpecProblem(pointer="--like", detail=no_spec(like), hint=nearest(like, catalog_names()))])
    try:
        with Client() as client:
            return client.ablations.spec(ablation_id(client, like))
    except ClientError as error:
        raise SpecError([SpecProblem(pointer="--like", detail=f"{no_spec(like)}; as an ablation: {error}")]) from error
