"""The one Jinja environment: templates come from package data alone, an undefined name is an error."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from ..errors import InternalError
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
        auto_reload=False,  # which looks at each template's file whenever one is rendered
    )


def render(template: str, **context: Any) -> str:
    """A template filled in, empty lines dropped.

    :raises InternalError: there is no such template, or none that it includes.
    """
    with held_off:  # Jinja's caches have locks of their own
        import jinja2

        try:
            text = environment().get_template(template).render(**context)
        except jinja2.TemplateNotFound as error:
            raise InternalError(f"{template}: there is no template {error.name}") from error
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip()) + "\n"
