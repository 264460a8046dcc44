"""What a campaign is, and what one of its inputs came to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Options = Mapping[str, str]

VERDICTS = ("right", "typed", "untyped", "hang", "crash", "wrong")
"""``right``: did what it should.  ``typed``: refused by an error of gradc/errors.py.  ``untyped``: any other error,
ours included.  ``hang``: no answer in time.  ``crash``: the process died.  ``wrong``: an answer that is not the right
one.
"""
FAILURES = ("untyped", "hang", "crash", "wrong")


@dataclass(frozen=True)
class Outcome:
    """What one input came to.

    :param verdict: one of :data:`VERDICTS`.  :param text: how to see it again, and what was seen.
    :param kind: findings of one kind are reported once and counted after that.
    :param counts: added up over the campaign and printed below its table.
    """

    verdict: str
    text: str = ""
    kind: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"a verdict {self.verdict!r}; there are {', '.join(VERDICTS)}")

    @property
    def failed(self) -> bool:
        return self.verdict in FAILURES


@dataclass(frozen=True)
class Campaign:
    """One way to look for defects.

    ``attempt`` runs in a child process, one seed after another.  What it raises is ``untyped``, its death is a
    ``crash``, and ``limit`` seconds without an answer are a ``hang``: a campaign needs no watchdog of its own.  Equal
    seeds and options give equal inputs.

    :param attempt: ``(seed, options) -> Outcome``.
    :param limit: seconds for one seed, many times what the slowest needs on a quiet machine.
    :param ci: how many seeds CI tries, from 0, where ``tries`` changed since: files and folders of the checkout.
    :param needs: optional packages without which there is nothing to run;
        with torch among them the child is no fork of the driver (:attr:`starts_anew`).
    :param options: names and defaults of what ``--option NAME=VALUE`` may change.
    :param environment: ``(options) -> variables`` that the child must be *started* with (``LD_PRELOAD``); where there
        are some it is no fork of the driver.
    :param missing: why this machine cannot run it (no sanitizer, another system), or "".
    :param shrink: ``(seed, outcome, options) -> Outcome``: a smaller input that fails in the same way; it may call
        :func:`~.driver.isolated`.
    """

    name: str
    attempt: Callable[[int, Options], Outcome]
    limit: float
    ci: int
    tries: tuple[str, ...] = ("gradc", "templates")
    needs: tuple[str, ...] = ()
    options: Options = field(default_factory=dict)
    environment: Callable[[Options], Mapping[str, str]] = lambda options: {}
    missing: Callable[[], str] = lambda: ""
    shrink: Callable[[int, Outcome, Options], Outcome] | None = None

    @property
    def starts_anew(self) -> bool:
        """Whether its child is a new process: in a fork torch refuses each backward once the driver's process has
        threads of autograd, as it has after other tests.
        """
        return "torch" in self.needs
