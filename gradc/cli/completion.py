"""completion: the script by which a shell completes commands, options, their values and files."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_GRADC_COMPLETE"
"""The shell's script calls gradc with it, and gradc answers."""


@click.command(short_help="The script that completes gradc's commands in a shell.")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script by which SHELL completes commands, options and their values, and files.

    \b
    gradc completion bash > ~/.local/share/bash-completion/completions/gradc
    gradc completion zsh > ~/.zfunc/_gradc         # with fpath+=~/.zfunc before compinit in ~/.zshrc
    gradc completion fish > ~/.config/fish/completions/gradc.fish
    """
    made = get_completion_class(shell)
    assert made is not None
    click.echo(made(context.find_root().command, {}, "gradc", VARIABLE).source().strip())
