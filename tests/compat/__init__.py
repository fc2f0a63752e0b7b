"""The compatibility check: every public name and command of the installed SDK, called against a running server."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything reads it: tokenizers are in the local cache
