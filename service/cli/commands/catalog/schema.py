"""`ablate catalog schema`: the JSON Schema of a spec."""

import typer

from ablate.experiments.design.spec import ablation_json_schema
from ablate.service.cli.output import JsonOption, guarded, print_json

app = typer.Typer()


@app.command()
@guarded
def schema(as_json: JsonOption = True) -> None:
    """Print the JSON Schema of a spec, for editors. The output is always JSON."""
    print_json(ablation_json_schema())
