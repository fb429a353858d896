"""`ablate schema`: the JSON Schema of a spec."""

import typer

from experiments.design.spec import ablation_json_schema
from service.cli.output import JsonOption, guarded, print_json

app = typer.Typer()


@app.command()
@guarded
def schema(as_json: JsonOption = True) -> None:
    """Print the JSON Schema of a spec, for editors. The output is always JSON."""
    print_json(ablation_json_schema())
