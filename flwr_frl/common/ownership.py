"""Recognise the checkpoints of this user's runs. Imports neither torch nor flwr.

A checkpoint has a keyed digest of its settings, as Jupyter signs the notebooks that a
user has executed. The key is a file in the user's cache and never leaves the machine.
"""

import hmac
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr_frl.common.files import PRIVATE, write_atomically

# Entry of a checkpoint's ``about`` with the digest.
SIGNATURE = "signature"


def cache_folder() -> Path:
    """Return the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flwr-frl"


def sign(settings: Mapping[str, Any]) -> str:
    """Return the signature of a run's settings, with a new key if there is none.

    It is empty if the key cannot be read or written.
    """
    file = cache_folder() / "key"
    try:
        if not file.exists():
            write_atomically(file, secrets.token_bytes(32), mode=PRIVATE)
        text = json.dumps(settings, sort_keys=True).encode()
        return hmac.digest(file.read_bytes(), text, "sha256").hex()
    # `Path.home` raises a RuntimeError for a user without a home.
    except (OSError, RuntimeError):
        return ""


def is_own(settings: Mapping[str, Any], signature: object) -> bool:
    """Return True if `sign` returns this signature of the settings."""
    expected = sign(settings)
    both = expected.encode(), str(signature).encode(errors="replace")
    return expected != "" and hmac.compare_digest(*both)
