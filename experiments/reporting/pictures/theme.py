"""Colours of pages and pictures by role, for light, dark and print, and their style sheet."""

from typing import NamedTuple


class Shade(NamedTuple):
    """One colour role in both themes."""

    light: str
    dark: str


SHADES: dict[str, Shade] = {
    "ink": Shade("#1b1f24", "#e8eaed"),
    "soft": Shade("#59626d", "#a7b0bb"),
    "grid": Shade("#e3e6ea", "#30363e"),
    "paper": Shade("#ffffff", "#15181c"),
    "band": Shade("#e4e8ed", "#2b323a"),
    "limit": Shade("#a83f00", "#ff9d5c"),
    "arm-0": Shade("#4d5661", "#b4bdc8"),
    "arm-1": Shade("#0072b2", "#56b4e9"),
    "arm-2": Shade("#c14f00", "#f08a3c"),
    "arm-3": Shade("#00805c", "#2cc79a"),
    "arm-4": Shade("#a8528a", "#e39ac4"),
    "arm-5": Shade("#9a6a00", "#e6b93d"),
    "arm-6": Shade("#2e7fb0", "#8fd0f5"),
    "arm-7": Shade("#6b6100", "#f0e442"),
}
"""Okabe-Ito hues, darkened or lightened to a contrast of at least 3:1 with the background."""

SANS = 'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", "DejaVu Sans", sans-serif'


def theme_css() -> str:
    """Return the style sheet of the roles' colours for light, dark and print."""
    light = " ".join(f"--{role}: {shade.light};" for role, shade in SHADES.items())
    dark = " ".join(f"--{role}: {shade.dark};" for role, shade in SHADES.items())
    return (
        f":root {{ color-scheme: light dark; --sans: {SANS}; {light} }} "
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    )
