"""The one Jinja environment: templates come from package data alone, an undefined name is an error."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from ..process.forks import held_off
from .text import template_dirs

if TYPE_CHECKING:
    import jinja2


@functools.cache
def environment() -> jinja2.Environment:
    import jinja2  # what comes from the cache is not rendered

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader([str(d) for d in template_dirs()]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def render(template: str, **context: Any) -> str:
    """A template filled in, empty lines dropped."""
    with held_off:  # Jinja's caches have locks of their own
        text = environment().get_template(template).render(**context)
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip()) + "\n"
