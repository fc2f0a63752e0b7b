"""vLLM as the sampling half of a backend: a child process, perhaps under another Python, fed with token ids.

`child` is the script that runs there and knows nothing of openrl; `process` holds it by its pipes; `sampler` implements
`SampleBackend` with it; `plan` says who gets which memory.
"""
