"""Optimizers as frozen records, whose steps are algebra on graphs; :func:`gradc.step` compiles value, gradients and
update as one program.
"""

from .optimizer import Now, Optimizer, Slot
from .optimizers import adafactor, adagrad, adam, adamw, lion, rowwise_adagrad, sgd

__all__ = ["adafactor", "adagrad", "adam", "adamw", "lion", "rowwise_adagrad", "sgd", "Now", "Optimizer", "Slot"]
