"""The suite: all cases, in the order of the table in docs/backends.md."""

from __future__ import annotations

from openrl.selftest import cases_full, cases_prompts, cases_sampling, cases_state, cases_training
from openrl.selftest.case import Case

CASES: tuple[Case, ...] = (
    *cases_training.CASES,
    *cases_state.CASES,
    *cases_full.CASES,
    *cases_sampling.CASES,
    *cases_prompts.CASES,
)
