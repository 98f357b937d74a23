"""Training: from a configuration to a run folder.

The function `regard.train` and this package share a name, and whoever imports a part of the package puts the package in the
function's place. So it can be called, and is then that function.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Path:
        from regard.api import train

        return train(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
