"""One base model on several devices: decoder layers sharded over ranks, datums spread over them, adapters on each."""
