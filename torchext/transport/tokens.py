"""The secret that the ends of a connection share."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def load_token(variable: str, file_name: str) -> str:
    """The token of this user: from the environment variable, else from a file, which is made if need be.

    The file lies in ``$XDG_CONFIG_HOME/torchext`` or ``~/.config/torchext``, readable for this user alone. Other hosts
    need the same: copy it, or set the variable.

    Raises:
        ValueError: The file is empty.
        OSError: It can be neither read nor made.
    """
    given = os.environ.get(variable)
    if given:
        return given
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "torchext"
    path = folder / file_name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        new = folder / f".{file_name}-{os.getpid()}-{secrets.token_hex(4)}"
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(32))
            with contextlib.suppress(FileExistsError):  # the first one wins
                os.link(new, path)
        finally:
            new.unlink()
    token = path.read_text().strip()
    if not token:
        raise ValueError(f"the token in {path} is empty: remove the file, and another one is made")
    return token
