"""The command line: `graph check | show | serve | status | scale | restart | drain | explain | logs | stop`.

Only the words of the commands are here. What they do is imported when one runs, so that
`graph --help` answers at once. Exit codes: 0 done, 1 failed, 2 called wrongly.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from graph.config import Resolved
    from graph.declare import GraphView

HERE = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


def _overrides(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that change a graph without editing it."""
    for decorate in reversed((
        click.option("--model", metavar="M", help="Model of every node that has one: folder or hub name."),
        click.option("-f", "files", multiple=True, metavar="YAML", type=click.Path(path_type=Path),
                     help="File of 'node: {option: value}'; later files win."),
        click.option("--set", "sets", multiple=True, metavar="NODE.OPT=V", help="One option or resource of a node."),
        click.option("--host", metavar="H", help="Address to listen on."),
        click.option("--port", type=click.IntRange(0, 65535), metavar="P", help="TCP port; 0 takes a free one."),
    )):  # fmt: skip
        command = decorate(command)
    return command


def _running(command: Callable[..., Any]) -> Callable[..., Any]:
    """The option that picks one of several running graphs."""
    return click.option("--graph", metavar="NAME", help="Which running graph, where there are several.")(command)


@click.group(context_settings=HERE)
@click.version_option(package_name="headrace", message="headrace %(version)s")
def cli() -> None:
    """Serve large language models as a declarative graph of components."""


@cli.command()
@click.argument("file", metavar="FILE[:NAME]")
@_overrides
def check(file: str, **overrides: Any) -> int:
    """Print every fault of a graph at once."""
    from graph.words import counted

    resolved = _resolve(file, overrides)
    view = _checked(resolved)
    click.echo(f"{view.name}: {counted(len(view.nodes), 'node')}, {counted(len(view.edges), 'edge')}, no faults")
    return 0


@cli.command()
@click.argument("file", metavar="FILE[:NAME]")
@click.option("--format", "form", type=click.Choice(["text", "mermaid", "json"]), default="text", show_default=True)
@click.option("--config", is_flag=True, help="Every option's value, and where it came from.")
@_overrides
def show(file: str, form: str, config: bool, **overrides: Any) -> int:
    """Draw a graph."""
    from graph.config import frozen_view
    from graph.show import FORMATS

    click.echo(FORMATS[form](frozen_view(_resolve(file, overrides)), config=config))
    return 0


@cli.command()
@click.argument("file", metavar="FILE[:NAME]")
@_overrides
@click.option("--on", "launcher", type=click.Choice(["local", "ray"]), default="local", help="Where replicas run.")
@click.option("--detach", is_flag=True, help="Return when the graph is ready; it keeps running.")
def serve(file: str, launcher: str, detach: bool, **overrides: Any) -> int:
    """Run a graph. The first Ctrl-C drains it, the second stops it."""
    if launcher == "ray":
        raise click.UsageError("--on ray is not there yet; leave it out to run on this machine")
    view = _checked(_resolve(file, overrides))
    from graph import commands

    return commands.serve(view, launcher=launcher, detach=detach)


@cli.command()
@_running
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.option("--watch", is_flag=True, help="Keep the table up to date.")
def status(graph: str | None, as_json: bool, watch: bool) -> int:
    """Tell how the running graph is."""
    from graph import commands

    return commands.status(graph, as_json, watch)


@cli.command()
@click.argument("targets", metavar="NODE=N|+N|-N...", nargs=-1, required=True)
@click.option("--no-wait", is_flag=True, help="Return at once.")
@_running
def scale(targets: tuple[str, ...], no_wait: bool, graph: str | None) -> int:
    """Change how many replicas nodes have, while they serve."""
    from graph import commands

    return commands.scale(graph, list(targets), not no_wait)


@cli.command()
@click.argument("target", metavar="NODE[/I]")
@_running
def restart(target: str, graph: str | None) -> int:
    """Restart a replica, or all of a node one by one."""
    from graph import commands

    return commands.restart(graph, target)


@cli.command()
@click.argument("target", metavar="NODE/I")
@_running
def drain(target: str, graph: str | None) -> int:
    """Let a replica finish its work and leave."""
    from graph import commands

    return commands.drain(graph, target)


@cli.command()
@click.option("-m", "--message", required=True, metavar="TEXT", help="What a user would say.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@_running
def explain(message: str, as_json: bool, graph: str | None) -> int:
    """Tell where a message would go, and why there."""
    from graph import commands

    return commands.explain(graph, message, as_json)


@cli.command()
@click.argument("target", metavar="[NODE[/I]]", required=False)
@click.option("-f", "--follow", is_flag=True, help="Keep printing what comes.")
@_running
def logs(target: str | None, follow: bool, graph: str | None) -> int:
    """Print the replicas' logs."""
    from graph import commands

    return commands.logs(graph, target, follow)


@cli.command()
@_running
def stop(graph: str | None) -> int:
    """Stop the running graph."""
    from graph import commands

    return commands.stop(graph)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command, and ends the process with its exit code."""
    from graph.errors import GraphError

    try:
        code = cli.main(arguments, prog_name="graph", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    except GraphError as error:
        click.echo(f"graph: {error}", err=True)
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


def _resolve(file: str, overrides: dict[str, Any]) -> Resolved:
    """Loads the graph and applies what the command line and the environment say."""
    from graph.config import resolve
    from graph.errors import DeclarationError
    from graph.loader import load_graph
    from graph.overrides import read_overrides

    try:
        read = read_overrides(**overrides, environ=os.environ)
    except DeclarationError as error:
        raise click.UsageError(str(error)) from error
    return resolve(*load_graph(file), read)


def _checked(resolved: Resolved) -> GraphView:
    """The view of a graph without faults; warnings are printed, faults end the command."""
    from graph.check import check as check_graph
    from graph.resources import this_machine

    report = check_graph(resolved.view, this_machine(os.environ), resolved.faults)
    for warning in report.warnings:
        click.echo(f"warning: {warning}", err=True)
    for fault in report.faults:
        click.echo(f"fault: {fault}", err=True)
    if report.faults:
        sys.exit(1)
    return resolved.view
