"""The compatibility check: every public name and command of the installed SDK, called against a running server."""
