"""What a library does to a matrix product before it stores it, and which of that cuBLASLt can do in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

T = TypeVar("T")
U = TypeVar("U")
Function = Literal["", "gelu", "gelu_grad"]
Summed = Literal["", "result", "first", "second"]
ARGUMENT_WORD: Mapping[Function, str] = {"gelu": "keeping", "gelu_grad": "at"}
"""Each function with the word before its argument."""
SUMMED: Sequence[Summed] = ("result", "first", "second")


@dataclass(frozen=True)
class Epilogue(Generic[T]):
    """``+ b[n] then gelu keeping h[m, n] then sum s[n] of result``: the product is added up, a bias added to each of
    its rows and a function applied to the sum, all in f32 (f64 for f64), and rounded once, as what is kept is.

    :param bias: a vector along the columns of the result.
    :param function: ``gelu``, by tanh, of the sum; ``gelu_grad``: the sum times gelu's derivative at ``argument``.
    :param argument: a matrix like the result: of ``gelu`` the argument, which is written, or None; of ``gelu_grad``
        what it is taken at, which is read.
    :param sums: a vector that is written: the sums over rows of the result before it is rounded, or of an operand over
        the axis that the product sums, one for each row of the result (first) or each column (second).
    :param summed: what is summed.
    """

    bias: T | None = None
    function: Function = ""
    argument: T | None = None
    sums: T | None = None
    summed: Summed = ""

    def __bool__(self) -> bool:
        return bool(self.bias is not None or self.function or self.sums is not None)

    @property
    def beyond_bias(self) -> bool:
        """Whether it is more than a bias."""
        return bool(self.function or self.sums is not None)

    @property
    def reads(self) -> tuple[T, ...]:
        argument = self.argument if self.function == "gelu_grad" else None
        return tuple(each for each in (self.bias, argument) if each is not None)

    @property
    def writes(self) -> tuple[T, ...]:
        argument = self.argument if self.function == "gelu" else None
        return tuple(each for each in (argument, self.sums) if each is not None)

    def map(self, change: Callable[[T], U]) -> Epilogue[U]:
        """The same of other operands."""
        bias, argument, sums = (None if x is None else change(x) for x in (self.bias, self.argument, self.sums))
        return Epilogue(bias, self.function, argument, sums, self.summed)

    @property
    def form(self) -> tuple[str, bool, bool, str]:
        """Its key in :data:`FORMS`."""
        return self.function, self.bias is not None, self.argument is not None, self.summed

    @property
    def words(self) -> str:
        """``, bias, gelu``: what it does, after a product's name."""
        bias = "bias" if self.bias is not None else ""
        return "".join(f", {each}" for each in (bias, self.function, self.summed and f"sums of {self.summed}") if each)

    def __str__(self) -> str:
        bias = f" + {self.bias}" if self.bias is not None else ""
        argument = f" {ARGUMENT_WORD[self.function]} {self.argument}" if self.argument is not None else ""
        function = f" then {self.function}{argument}" if self.function else ""
        sums = f" then sum {self.sums} of {self.summed}" if self.sums is not None else ""
        return bias + function + sums


PLAIN: Epilogue[Any] = Epilogue()
"""That of a product which is only stored."""
FORMS = {
    ("", False, False, ""): 1,
    ("", True, False, ""): 4,
    ("gelu", False, False, ""): 32,
    ("gelu", True, False, ""): 36,
    ("gelu", False, True, ""): 160,
    ("gelu", True, True, ""): 164,
    ("gelu_grad", False, True, ""): 192,
    ("gelu_grad", False, True, "result"): 208,
    ("", False, False, "second"): 256,
    ("", False, False, "first"): 512,
}
"""The epilogues of one call, as ``cublasLtEpilogue_t`` numbers them: DEFAULT, BIAS, GELU, GELU_BIAS, GELU_AUX,
GELU_AUX_BIAS, DGELU, DGELU_BGRAD, BGRADA and BGRADB (cublasLt.h; cuBLAS's A is our second operand).

Its GELU is the tanh approximation (PyTorch's pull request 104061, "Unify GELU tanh approximation in
_addmm_activation", whose GPU path is this epilogue).  Its RELU is none of them: it makes 0 of NaN (NVIDIA's developer
forum, topic 329783), which ours keeps.
"""
