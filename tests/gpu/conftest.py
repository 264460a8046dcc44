"""Each test of this folder on every machine: marked gpu and skipped without one, or on the simulator in its checking
mode.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from gpu_in_memory import installed
from machines import KINDS, Machine, checked, why_not
from models import MODELS


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--queue", default="", help="a folder through which several processes share out the tests")
    parser.addoption("--results", default="", help="a file to which each test's outcome is appended as a line of JSON")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = [item for item in items if possible(item)]
    if len(kept) < len(items):
        stay = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in stay])
        items[:] = kept


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Of the processes with one ``--queue`` each takes the next test that none has taken: they end together."""
    folder = session.config.getoption("--queue")
    if not folder or session.testsfailed or session.config.option.collectonly:  # as pytest does
        return None
    for number, item in enumerate(session.items):  # the same ones in the same order in every process
        if taken(Path(folder) / str(number)):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        if stopped := session.shouldfail or session.shouldstop:
            raise (session.Failed if session.shouldfail else session.Interrupted)(stopped)
    return True


def taken(ticket: Path) -> bool:
    """Whether this process is the first to take it."""
    try:
        ticket.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def possible(item: pytest.Item) -> bool:
    """Not a model of a dtype that the machine's library has no arrays of."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return (
        params.get("name") not in MODELS
        or "machine" not in params
        or params["machine"].takes_all(MODELS[params["name"]].graph)
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``machine``: all; a mark ``places("cuda")`` keeps some, ``kinds("torch")`` some libraries."""
    if "machine" not in metafunc.fixturenames:
        return
    places = next((m.args for m in metafunc.definition.iter_markers("places")), tuple(KINDS))
    kinds = next((m.args for m in metafunc.definition.iter_markers("kinds")), ())
    machines = [Machine(place, kind) for place in places for kind in KINDS[place] if kind in kinds or not kinds]
    metafunc.parametrize(
        "machine",
        [pytest.param(m, marks=[pytest.mark.gpu] if m.on_gpu else []) for m in machines],
        ids=str,
        indirect=True,
    )


@pytest.fixture
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    found: Machine = request.param
    reason = why_not(found.place, found.kind)
    if reason:
        pytest.skip(reason)
    with (
        pytest.MonkeyPatch.context() as patch,
        installed(patch) if found.place == "memory" else nullcontext(),
        checked(found),
    ):
        yield found


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "places(*names): of the folder tests/gpu, where a test runs")
    config.addinivalue_line(
        "markers", "kinds(*libraries): of the folder tests/gpu, the libraries whose arrays a test takes"
    )


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()
    path = item.config.getoption("--results")
    if not path or not (report.when == "call" or report.failed or report.skipped):
        return
    text = (
        str(report.longrepr[2]).removeprefix("Skipped: ")
        if report.skipped and isinstance(report.longrepr, tuple)
        else report.longreprtext[-3000:]
    )
    with Path(path).open("a") as file:
        file.write(
            json.dumps(
                {"test": item.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 3), "text": text}
            )
            + "\n"
        )
