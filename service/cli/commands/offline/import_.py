"""`ablate offline import`: store the bundle of an ablation that ran without a service."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ablate.experiments.records.bundle import join_bundles
from ablate.service.cli.output import JsonOption, guarded, out, print_json
from ablate.service.client.api import Client

app = typer.Typer()


@app.command("import")
@guarded
def import_(
    bundles: Annotated[
        list[Path], typer.Argument(metavar="BUNDLE...", help="Folders or tar files with blocks of one plan.")
    ],
    trust: Annotated[
        list[str] | None,
        typer.Option("--trust", metavar="KEY", help="Trust this key from now on. Repeat it for more keys."),
    ] = None,
    unsigned: Annotated[bool, typer.Option("--unsigned", help="Accept bundles without a signature.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Store an ablation that `ablate offline exec` ran. The service verifies every file and stores all or nothing."""
    from ablate.service.cli.offline import read_bundle  # imports the judge

    contents = [read_bundle(path) for path in bundles]
    join_bundles([bundle for _, bundle in contents])
    with Client() as client:
        answer = client.ablations.import_bundles([files for files, _ in contents], trust=trust or (), unsigned=unsigned)
    if as_json:
        print_json(answer)
        return
    console = out()
    for remark in answer.remarks:
        console.print(f"[yellow]note[/]  {escape(remark)}")
    if not answer.changed:
        console.print(f"{answer.id} was imported from the same files before; nothing was changed")
        return
    missing = f"; {len(answer.block_indices_missing)} are missing data" if answer.block_indices_missing else ""
    console.print(f"[bold]{escape(answer.name)}[/] imported as [bold]{answer.id}[/]: {answer.state}")
    console.print(f"  blocks   {answer.blocks_imported} imported{missing}")
    console.print(f"  answer   ablate verdict {answer.id} --explain")
    console.print(f"  report   ablate report {answer.id}")
