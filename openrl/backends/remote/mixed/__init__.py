"""One server for models of this machine and of remotes: a rule table sends each base model to its place, and whatever
comes of it (runs, samplers, futures, checkpoints) follows. `docs/architecture.md` has the idea."""
