"""One contract for all backends: a suite that runs on any machine, with answers computed in float64 beforehand.

`tests/contract/test_suite.py` and `openrl doctor --self-test` run it. It needs numpy and safetensors alone, so that it
runs wherever a backend does.
"""
