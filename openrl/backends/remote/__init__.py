"""A server that computes nothing itself: every call goes on to another OpenRL server, and survives what happens to the
connection on the way. `docs/architecture.md` has the idea, `docs/remote.md` what a user sees of it."""
