"""The steps of a batch as few launches: what they start of one function is started together.

A function that a batch starts is given one parameter, in which the arguments of several launches stand one behind
another; a block finds its launch by the numbers of their first blocks, and does there what it would do alone.  So the
same text serves a step alone, whose batch has one member.  ``templates/cuda/batch.h`` has the parameter.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from ...ir.kernel import Call, Kernel, Program, alternatives
from ..text import enumerators, standalone
from .actions import FLAG, Action, Launch, Part
from .calls import CALLS
from .finished_rows import launched
from .kernel import CudaKernel

HEAD = 1
"""Words before those of members: how many these are."""
WORDS = enumerators("cuda/batch.h")["GRADC_BATCH_WORDS"]
"""Of 8 bytes, of the parameter; the flag's address is another."""
MOST_BLOCKS = 2**31 - 1
"""Of a grid."""
_FUNCTION = re.compile(
    r'^extern "C" __global__ void __launch_bounds__\((?P<bounds>[^)]*)\) (?P<name>\w+)\((?P<given>[^)]*)\) \{\n'
    r"(?P<body>.*?)^\}(?:\n|\Z)",
    re.MULTILINE | re.DOTALL,
)
_OF_MEMBER = "const u32 gradc_block, const u32 gradc_blocks, const i64 gradc_checks"
_OF_ALL = "const __grid_constant__ gradc_batch batch, u64 *const flag"
_PARAMETER = re.compile(r"\s*(?P<type>.*?)(?:\s*const\s+|\s+|(?<=\*))(?P<name>\w+)", re.DOTALL)


def started_together(program: Program, kernels: Mapping[str, CudaKernel]) -> frozenset[str]:
    """The functions that steps of a program's batches start."""
    steps = launched(program)
    batched = [step for begin, end in program.batches for step in steps[begin:end] if step is not None]
    items = {item for step in batched for item in alternatives(step)}
    own = [kernels[item.name] for item in items if isinstance(item, Kernel)]
    texts = [text for item in items if isinstance(item, Call) for text in CALLS[item.op].text(program, [item])]
    texts += [standalone("cuda/sort.cu")] if any(kernel.keys is not None for kernel in own) else []
    of_texts = {function["name"] for text in texts for function in _FUNCTION.finditer(text)}
    return frozenset({stage.name for kernel in own for stage in kernel.stages} | of_texts)


def with_members(text: str, functions: Collection[str]) -> str:
    """A text in which these functions are given the arguments of several launches."""

    def written(function: re.Match[str]) -> str:
        return _of_members(**function.groupdict()) if function["name"] in functions else function[0]

    return _FUNCTION.sub(written, text)


def _of_members(name: str, bounds: str, given: str, body: str) -> str:
    """A function, given a batch; a check that fails stops no other member, whose number it stands before."""
    parameters = [found for each in given.split(",") if (found := _PARAMETER.fullmatch(each))]
    words = [p for p in parameters if p["name"] != "flag"]
    place = {p["name"]: 1 + i for i, p in enumerate(words)}
    types = [re.sub(r"\s*__restrict__", "", p["type"]) for p in parameters]
    arguments = ", ".join(
        "flag" if p["name"] == "flag" else f"({t})batch.words[at + {place[p['name']]}]"
        for p, t in zip(parameters, types, strict=True)
    )
    each = 1 + len(words)
    own = body.replace("blockIdx.x", "gradc_block").replace("gridDim.x", "gradc_blocks")
    own = own.replace("gradc_stopped(flag, site)", "gradc_stopped(flag, gradc_checks)")
    return f"""GRADC_FN void {name}_of({given}, {_OF_MEMBER}) {{
{own}}}
extern "C" __global__ void __launch_bounds__({bounds}) {name}({_OF_ALL}) {{
  const int at = gradc_member<{each}>(batch, blockIdx.x);
  const u32 first = (u32)batch.words[at];
  {name}_of({arguments}, blockIdx.x - first, (u32)batch.words[at + {each}] - first, batch.words[{place["site"]}]);
}}
"""


def alone(actions: Sequence[Action], functions: Collection[str]) -> list[Action]:
    """What a step starts, functions that take members with one."""
    return [_joined([a]) if isinstance(a, Launch) and a.function in functions else a for a in actions]


def together(members: Sequence[Sequence[Launch]]) -> list[Launch]:
    """What each member of a batch starts in its order -> the same, of one function together: a b c, a c, a b b c are a,
    b, b and c.
    """
    return [_joined(part) for group in _in_step([[*launches] for launches in members]) for part in _parts(group)]


def _in_step(left: list[list[Launch]]) -> Iterator[list[Launch]]:
    """The next launches of those that are at the same function: at one that no other member comes to later, if there is
    one.
    """
    while left := [launches for launches in left if launches]:
        heads = dict.fromkeys(_kind(launches[0]) for launches in left)
        later = {kind: {_kind(x) for m in left if _kind(m[0]) != kind for x in m[1:]} for kind in heads}
        kind = next((kind for kind in heads if kind not in later[kind]), next(iter(heads)))
        yield [launches.pop(0) for launches in left if _kind(launches[0]) == kind]


def _kind(launch: Launch) -> tuple[object, ...]:
    return launch.function, launch.threads, launch.wide, launch.shared


def _parts(group: Sequence[Launch]) -> Iterator[Sequence[Launch]]:
    """Launches of one function in parts that have room in its parameter, and their blocks in a grid."""
    part: list[Launch] = []
    for launch in group:
        room = (WORDS - HEAD - 1) // (1 + len(_words(launch)))
        if part and (len(part) == room or sum(each.blocks for each in part) + launch.blocks > MOST_BLOCKS):
            yield part
            part = []
        part.append(launch)
    if part:
        yield part


def _words(launch: Launch) -> list[tuple[int, Part | int]]:
    """The arguments of a launch that are its own, and their places."""
    return [(i, x) for i, x in enumerate(launch.args) if not (isinstance(x, Part) and x.root == FLAG)]


def _joined(launches: Sequence[Launch]) -> Launch:
    """Launches of one function as one."""
    (flag,) = {x for x in launches[0].args if isinstance(x, Part) and x.root == FLAG}
    args: list[Part | int] = [len(launches)]
    written: list[int] = []
    blocks = 0
    for launch in launches:
        words = _words(launch)
        written += [len(args) + 1 + at for at, (i, _) in enumerate(words) if i in launch.written]
        args += [blocks, *(word for _, word in words)]
        blocks += launch.blocks
    args += [blocks, *[0] * (WORDS - 1 - len(args))]
    checks = [WORDS] if any(launch.args[i] == flag for launch in launches for i in launch.written) else []
    first = launches[0]
    return Launch(
        first.function, blocks, first.threads, (*args, flag), (*written, *checks), first.wide, first.shared, WORDS
    )
