"""The options of :func:`gradc.compile` as one record: defaults, checks, descriptions, and the command line flags."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, ParamSpec, TypeVar, cast

from ..analysis.strategies import ON_GPU, ON_HOST
from ..errors import InvalidProblem, Unsupported
from ..interp import sizes_given
from ..ir.graph import Graph
from ..process.forks import held_off
from ..runtime.cuda import gpu
from ..runtime.host.toolchain import cpu_model
from ..targets.calibration import calibration_text_for
from ..targets.devices import CPU

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Given:
    """The given value of an option, with the compilation that it is for.

    :param wrt: the inputs to differentiate by.
    """

    name: str
    value: Any
    graph: Graph
    target: str
    wrt: Sequence[str]


Check = Callable[[Given], Any]
"""Returns the value in canonical form, or raises an error of :mod:`gradc.errors`."""


def one_named(names: Sequence[str]) -> str:
    """Strings to choose from, in words."""
    *others, last = (f'``"{name}"``' for name in names)
    return f"{', '.join(others)} or {last}"


# -- the checks --------------------------------------------------------------------------------------------------------


def unchecked(given: Given) -> Any:
    """No check here: the option's consumer (such as the cost model) checks it."""
    return given.value


@dataclass(frozen=True)
class OneOf:
    """One of these values."""

    known: tuple[Any, ...]

    def __call__(self, given: Given) -> Any:
        if given.value not in self.known:
            raise InvalidProblem(f"{given.name}={given.value!r}; there are {', '.join(map(str, self.known))}")
        return given.value


def one_of(*known: Any) -> OneOf:
    """One of these values."""
    return OneOf(known)


def names_of(name: str, value: Any) -> tuple[str, ...]:
    """A name or a collection of names, as a tuple.

    :param name: of the argument, for errors.
    :raises InvalidProblem: it is neither.
    """
    names: list[Any] = (
        [value]
        if isinstance(value, str)
        else list(value)
        if isinstance(value, Collection) and not isinstance(value, Mapping)
        else [None]
    )
    if not all(isinstance(each, str) for each in names):
        raise InvalidProblem(f"{name}={value!r}: a name or a list of names")
    return tuple(names)


def expand(graph: Graph, names: Sequence[str]) -> list[str]:
    """Expands prefixes to names of inputs: ``params`` becomes ``params.l1.w``, ``params.l1.b``..."""
    out: list[str] = []
    for name in names:
        below = [n for n in graph.input_names if n.startswith(name + ".")]
        out += [name] if name in graph.input_names or not below else below
    return out


def names(given: Given) -> tuple[str, ...]:
    """A name, several names, or None."""
    return names_of(given.name, given.value or ())


def tables(given: Given) -> tuple[str, ...]:
    """Names of inputs in ``wrt``."""
    found = tuple(expand(given.graph, names(given)))
    unknown = [name for name in found if name not in given.wrt]
    if unknown:
        raise InvalidProblem(f"sparse names {unknown[0]!r}, which is not in wrt: {', '.join(given.wrt) or 'nothing'}")
    return found


def kept_values(given: Given) -> str | tuple[str, ...]:
    """A policy, or names of values."""
    if given.value in ("min-cut", "all", "none"):
        return cast(str, given.value)
    if isinstance(given.value, str):
        raise InvalidProblem(f"save={given.value!r}; there are 'min-cut', 'all', 'none' and a list of names")
    return names_of("save", given.value)


def byte_budget(given: Given) -> int | float | None:
    """Bytes, or a fraction, or None."""
    budget = given.value
    possible = budget >= 0 if type(budget) is int else isinstance(budget, float) and 0 <= budget <= 1
    if budget is not None and not possible:
        raise InvalidProblem(
            f"memory_budget={budget!r}: bytes as an int from 0, or a fraction as a float from 0.0 to 1.0"
        )
    return cast("int | float | None", budget)


def sizes(given: Given) -> dict[str, int] | None:
    """Sizes of the graph's symbols, or None."""
    if given.value is None:
        return None
    found = sizes_given(given.value, given.name)
    unknown = found.keys() - set(given.graph.dims)
    if unknown:
        raise InvalidProblem(
            f"{given.name} names {min(map(str, unknown))!r}; the dims of {given.graph.name} are"
            f" {', '.join(given.graph.dims) or 'none'}"
        )
    return found


def strategies(given: Given) -> Mapping[str, str] | None:
    """A map from outputs to strategies that the target has, or None."""
    force = given.value
    if force is not None and not (isinstance(force, Mapping) and all(isinstance(k, str) for k in force)):
        raise InvalidProblem(f"reductions={force!r}: it maps names of outputs, or '*', to strategies")
    if force:
        known = ON_GPU if given.target.startswith("cuda") else ON_HOST
        for name, strategy in force.items():
            if strategy not in known:
                raise Unsupported(f"the reduction {strategy!r} for {name!r}: there are {', '.join(known)}")
    return cast("Mapping[str, str] | None", force)


# -- the record --------------------------------------------------------------------------------------------------------


def option(default: Any, check: Check, meaning: str, flag: str = "", metavar: str = "") -> Any:
    """A field of :class:`Options`.

    :param meaning: its description in the docstring of :func:`gradc.compile`.
    :param flag: the help of the command line flag; "" if there is none.
    :param metavar: the flag's placeholder for the value.
    """
    metadata = {"check": check, "meaning": meaning, "flag": flag, "metavar": metavar}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Options:
    """The checked options of a compilation; each field is a keyword of :func:`gradc.compile`."""

    numerics: Literal["real", "strict"] = option(
        "real",
        one_of("real", "strict"),
        '``"real"`` allows rewrites that are exact over the reals, ``"strict"`` only bit-exact ones.',
        flag="real allows rewrites that are exact over the reals; strict only bit-exact ones.",
    )
    fuse: bool = option(
        True,
        one_of(True, False),
        "False gives each node its own kernel.",
        flag="Fuse nodes into kernels, or one kernel per node.",
    )
    save: str | tuple[str, ...] = option(
        "min-cut",
        kept_values,
        'the residuals that forward keeps for backward: ``"min-cut"``, ``"all"``, ``"none"`` or names of values.',
        flag="The residuals that forward keeps for backward: min-cut, all, none, or names of values.",
        metavar="HOW",
    )
    memory_budget: int | float | None = option(
        None,
        byte_budget,
        "limit of the residuals, not counting inputs: an int, in bytes, for the sizes ``hints`` and ``dims``; or a"
        " fraction from 0.0, the least possible, to 1.0, what ``save`` keeps.  Other values are recomputed in backward,"
        " including reductions, but never matrix products and scatters.",
        flag="Limit of the residuals at --dims: 4096, 64MB, or a fraction of what --save keeps, 0.5.",
        metavar="BYTES",
    )
    residuals: Literal["own", "borrow"] = option(
        "own",
        one_of("own", "borrow"),
        '``"borrow"`` lets backward read outputs of forward, as it reads inputs: an output must not be changed before'
        " backward.  A torch tensor that was raises InvalidProblem, another array where GRADC_CHECK_RESIDUALS is set;"
        ' ``"own"`` keeps values of its own.',
    )
    hints: Mapping[str, int] | None = option(
        None,
        sizes,
        "typical sizes of symbols, by which residuals are chosen; they do not fix the sizes.  The default is 1024.",
    )
    unused: Literal["error", "zeros"] = option(
        "error",
        one_of("error", "zeros"),
        '``"zeros"`` gives a zero gradient to an input that no differentiable path reaches, ``"error"`` raises.',
    )
    reductions: Mapping[str, str] | None = option(
        None,
        strategies,
        f'``{{"*" or output: strategy}}`` forces the choice.  On a CPU a strategy is {one_named(ON_HOST)}; in CUDA'
        f" {one_named(ON_GPU)}.",
        flag="Force how rows are combined into NAME, or * for all; a wrong name or strategy lists the right ones.",
        metavar="NAME=STRATEGY",
    )
    dims: Mapping[str, int] | None = option(None, sizes, "values of symbols that no argument determines.")
    donate: tuple[str, ...] = option((), names, "inputs whose memory may be reused for outputs.")
    sparse: tuple[str, ...] = option((), tables, "tables whose gradients are returned as :class:`gradc.SparseRows`.")
    arch: str | None = option(
        None,
        unchecked,
        'the architecture for the target cuda; by default that of the current device, or ``"sm_90"`` without one.',
        flag="The architecture for --target cuda.",
        metavar="sm_90",
    )
    determinism: Literal["run", "none"] = option(
        "run",
        one_of("run", "none"),
        '``"run"``: every run gives the same bits; ``"none"`` allows a GPU to add floats in any order if it is faster.',
    )
    errors: Literal["sync", "async"] | None = option(
        None,
        one_of(None, "sync", "async"),
        'when errors of data (indices) are raised on a GPU: ``"async"`` by ``module.synchronize()`` or a later call,'
        ' ``"sync"`` by the call itself, which waits.',
    )
    convolutions: Literal["cudnn", "windows"] | None = option(
        None,
        one_of(None, "cudnn", "windows"),
        'what computes convolutions on a GPU: ``"cudnn"`` calls cuDNN through the package ``nvidia-cudnn-frontend``,'
        ' ``"windows"`` matrix products of their windows; by default cuDNN for the target cuda where that package is'
        " installed, be there a GPU or not.",
        flag="What computes convolutions for --target cuda: cudnn or windows.",
    )
    device: str | None = option(
        None,
        unchecked,
        'the device whose constants are used to choose reductions, by its name in the cost model (``"H200"``); by'
        " default the current device, or the default one of ``arch``.",
    )
    calibration: str | None = option(
        None,
        unchecked,
        'a file written by ``gradc calibrate``, the text of one, or ``"none"``; by default the targets cpu and cuda'
        " read the file in ``GRADC_CALIBRATION`` or the user's configuration directory, if any, and cpu else the one"
        " that comes with gradc for some processors.  A module stores its contents.",
    )

    def given(self) -> dict[str, Any]:
        """The options as keywords of :func:`gradc.compile`."""
        return dict(vars(self))

    def for_other_target(self) -> dict[str, Any]:
        """:meth:`given`, without those whose defaults :func:`for_target` gives."""
        return {name: value for name, value in vars(self).items() if name not in OF_TARGET}

    def without_gradients(self) -> Options:
        """The options that are left for the same graph without ``wrt``."""
        forced = {name: how for name, how in (self.reductions or {}).items() if not name.startswith("d.")}
        return replace(self, save="min-cut", memory_budget=None, residuals="own", reductions=forced or None, sparse=())

    def as_json(self) -> dict[str, Any]:
        """The options by name, with values that JSON can represent."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}


FIELDS = fields(Options)
"""In their metadata: ``check``, ``meaning``, ``flag`` and ``metavar``, as :func:`option` takes them."""
NAMES = tuple(each.name for each in FIELDS)
OF_TARGET = ("arch", "device", "calibration", "errors", "convolutions")
"""Options whose defaults depend on the target, the current GPU and processor and what is installed."""
TEXTS = tuple(f.name for f in FIELDS if re.fullmatch(r"(str|Literal\[.*\])( \| None)?", str(f.type)))
"""Options whose values are strings or None."""


def check_names(given: Mapping[str, Any]) -> None:
    """InvalidProblem if a name is not that of an option."""
    unknown = given.keys() - set(NAMES)
    if unknown:
        known = (*NAMES, "layout", "update")
        raise InvalidProblem(f"compile has no option {min(unknown)!r}; it has {', '.join(known)}")


def checked(given: Mapping[str, Any], graph: Graph, target: str, wrt: Sequence[str]) -> Options:
    """The given options, checked, with the defaults of the others.

    :raises InvalidProblem, Unsupported: an option is invalid.
    """
    values = {each.name: given.get(each.name, each.default) for each in FIELDS}
    return Options(
        **{
            each.name: each.metadata["check"](Given(each.name, values[each.name], graph, target, wrt))
            for each in FIELDS
        }
    )


def for_target(options: Options, target: str) -> Options:
    """The options with the defaults of :data:`OF_TARGET`.

    :raises InvalidProblem: a GPU option is given for another target.
    """
    if options.arch is not None and target != "cuda":
        raise InvalidProblem(f"arch={options.arch!r} is for the target 'cuda', not {target!r}")
    if options.errors == "async" and target != "cuda":
        raise InvalidProblem(
            f"errors='async' is for the target 'cuda': {target!r} has raised its errors when a call returns"
        )
    options = replace(options, errors=options.errors or ("async" if target == "cuda" else "sync"))
    if not target.startswith("cuda"):
        for name in ("device", "convolutions"):
            if getattr(options, name) is not None:
                raise InvalidProblem(f"{name}={getattr(options, name)!r} is for a GPU, not for the target {target!r}")
        text = calibration_text_for(CPU, options.calibration, own=target == "cpu", model=cpu_model())
        return replace(options, calibration=text)
    with held_off:
        from ..runtime.cuda.cudnn_version import installed
        from ..targets.devices import gpu_of, listed_device

    if target == "cuda":
        options = replace(options, convolutions=options.convolutions or ("cudnn" if installed() else "windows"))
        here = gpu.current_device() if gpu.usable() else None
        arch, device = options.arch or (here.arch if here is not None else "sm_90"), options.device
        if not device and here is not None and here.arch == arch:
            device = listed_device(here.name, arch).name
        options = replace(options, arch=arch, device=device)
    text = calibration_text_for(
        gpu_of(options.device or options.arch), options.calibration, own=target == "cuda"
    )  # the module stores the contents, not the path
    return replace(options, calibration=text)


# -- what is read off the record ---------------------------------------------------------------------------------------


def documented(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator for functions that take the options as keywords: adds the options to the signature, and their
    descriptions to the docstring, before ``:raises``.
    """
    own = inspect.signature(function)
    named = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    keywords = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type) for f in FIELDS
    ]
    function.__signature__ = own.replace(parameters=[*named, *keywords])  # type: ignore[attr-defined]
    before, raises, after = (function.__doc__ or "").partition("    :raises")
    function.__doc__ = f"{before}{documentation()}\n{raises}{after}"
    return function


def documentation(indent: str = "    ") -> str:
    """A ``:param NAME:`` for each option."""
    wrap = textwrap.TextWrapper(120, initial_indent=indent, subsequent_indent=indent * 2, break_on_hyphens=False)
    return "\n".join(wrap.fill(f":param {f.name}: {f.metadata['meaning']}") for f in FIELDS)
