"""The catalog: complete specs that ship with the program, readable from top to bottom."""

from importlib import resources

from experiments.design.problems import listed, nearest


class UnknownCatalogFile(LookupError):
    """No spec of that name is in the catalog."""


def catalog_names() -> tuple[str, ...]:
    """Return the names of the shipped specs, sorted."""
    names = (entry.name for entry in resources.files("experiments.catalog").iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


def read_catalog_file(name: str) -> bytes:
    """Return the YAML of the shipped spec `name`; raises UnknownCatalogFile with the known names."""
    known = catalog_names()
    if name not in known:
        hint = nearest(name, known)
        tail = f" ({hint})" if hint else ""
        raise UnknownCatalogFile(f"no catalog file {name!r}; known: {listed(known)}{tail}")
    return resources.files("experiments.catalog").joinpath(f"{name}.yaml").read_bytes()
