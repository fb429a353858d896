"""`ablate import`: take in what ran without a service."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from experiments.records.bundle import join_bundles
from service.cli.bundles import read_bundle
from service.cli.output import JsonOption, guarded, out, print_json
from service.client.api import Client

app = typer.Typer()


@app.command("import")
@guarded
def import_(
    bundles: Annotated[list[Path], typer.Argument(metavar="BUNDLE...", help="Folders or tar files of one plan.")],
    trust: Annotated[
        list[str] | None, typer.Option("--trust", metavar="KEY", help="Trust this key from now on; may be repeated.")
    ] = None,
    unsigned: Annotated[bool, typer.Option("--unsigned", help="Take files that nobody signed.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Take in an ablation that `ablate exec` ran: verified file by file, stored whole or not at all."""
    contents = [read_bundle(path) for path in bundles]
    join_bundles([bundle for _, bundle in contents])
    with Client() as client:
        answer = client.ablations.import_bundles(
            [{path: data.decode() for path, data in files.items()} for files, _ in contents],
            trust=trust or (),
            unsigned=unsigned,
        )
    if as_json:
        print_json(answer)
        return
    console = out()
    for remark in answer.remarks:
        console.print(f"[yellow]note[/]  {escape(remark)}")
    if not answer.changed:
        console.print(f"{answer.id} was imported from exactly this before; nothing was changed")
        return
    missing = f"; {len(answer.block_indices_missing)} are missing data" if answer.block_indices_missing else ""
    console.print(f"[bold]{escape(answer.name)}[/] imported as [bold]{answer.id}[/]: {answer.state}")
    console.print(f"  blocks   {answer.blocks_imported} imported{missing}")
    console.print(f"  answer   ablate verdict {answer.id} --explain")
    console.print(f"  report   ablate report {answer.id}")
