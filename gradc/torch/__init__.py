"""gradc beside PyTorch: a backend of torch.compile, an importer, modules of torch.nn; docs/torch.md.

Imported on its own: ``import gradc`` does without torch.
"""

from __future__ import annotations

from .coverage import Report, report
from .dynamo import backend
from .exported import from_torch
from .module import Module

__all__ = ["Module", "Report", "backend", "from_torch", "report"]
