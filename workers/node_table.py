"""This node as a table for people."""

from rich.table import Table

from workers.node import Node


def describe(node: Node) -> Table:
    """Return what the probe found and what it lacks, for people."""
    table = Table(title=f"node {node.name}", show_header=False, title_justify="left")
    table.add_row("class", node.node_class.value)
    for device in node.devices.devices:
        table.add_row(f"device {device.index}", f"{device.name}, {device.memory_bytes / 2**30:.1f} GiB")
    table.add_row("cores", str(node.cores))
    table.add_row("versions", ", ".join(f"{name} {version}" for name, version in node.versions.items()))
    dirty = " with uncommitted changes" if node.code.git_dirty_digest else ""
    table.add_row("code", f"{node.code.digest[:19]}, commit {(node.code.git_commit or 'unknown')[:12]}{dirty}")
    for sentence in node.lacks:
        table.add_row("[yellow]lacks[/yellow]", sentence)
    return table
