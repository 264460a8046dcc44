"""gradc beside PyTorch: a backend of torch.compile, an importer, modules of torch.nn; docs/torch.md.

Imported on its own: ``import gradc`` does without torch.
"""

from __future__ import annotations

import torch  # noqa: F401  # where there is none, this line says so

from ..runtime.torch_private import check_release

check_release()  # before anything that an older torch lacks

from .coverage import Report, report  # noqa: E402
from .dynamo import backend  # noqa: E402
from .exported import from_torch  # noqa: E402
from .module import Module  # noqa: E402

__all__ = ["Module", "Report", "backend", "from_torch", "report"]
