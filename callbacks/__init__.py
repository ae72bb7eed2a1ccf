"""Lightning callbacks over the parts of torchext. Import as ``torchext.callbacks``, never as ``callbacks``."""

from __future__ import annotations

__all__: list[str] = []
