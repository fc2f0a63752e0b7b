"""The client side of other OpenRL servers: calling them, checking them, moving checkpoints between them."""
