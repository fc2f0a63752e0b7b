"""vLLM as the sampling half of a backend: a child process, perhaps under another Python, fed with token ids.

`child` is what runs there, files that know nothing of openrl; `process` holds it by its pipes; `sampler` implements
`SampleBackend` with it; `plan` says who gets which memory.
"""
