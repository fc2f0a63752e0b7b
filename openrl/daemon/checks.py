"""Content checks at the door, against what is known of the model, so that bad input hears at once."""

from __future__ import annotations

import asyncio

from openrl.checkpoints import age
from openrl.checkpoints.layout import parse
from openrl.daemon.execute import check_spec
from openrl.daemon.work import LoadState, NewRun, OptimStep, SaveExternal, SaveSampler, SaveState, Train, Work
from openrl.errors import OpenRLError
from openrl.types import FullSpec, LoraSpec, ModelInfo, TrainSpec
from openrl.validation import check_adam, check_checkpoint_name, check_full, check_optimizer, check_train, check_ttl

_MANY_TOKENS = 20_000  # above this a check takes milliseconds and leaves the event loop


def spec_of(new: NewRun, seed: int) -> TrainSpec:
    """What a run that is asked for would be: rank 0 is the wire's word for training all parameters (F1)."""
    if new.rank == 0:
        return FullSpec()
    return LoraSpec(new.rank, seed, new.train_attn, new.train_mlp, new.train_unembed)


def check_new_run(new: NewRun, spec: TrainSpec, info: ModelInfo | None) -> OpenRLError | None:
    """Why a run cannot be made, if so. Without `info` (a model seen for the first time) the rank is checked later."""
    try:
        check_optimizer(new.optimizer)
        if isinstance(spec, FullSpec):
            flags = {"train_attn": new.train_attn, "train_mlp": new.train_mlp, "train_unembed": new.train_unembed}
            check_full(info, **flags)
        if info is not None:
            check_spec(spec, info)
    except OpenRLError as error:
        return error
    return None


async def check_work(work: Work, info: ModelInfo | None) -> None:
    """Raise BadRequest for content that can never work."""
    match work:
        case Train(payload, _, program):
            if info is None:
                return
            if sum(len(datum.tokens) for datum in payload.data) > _MANY_TOKENS:
                await asyncio.to_thread(check_train, payload, info, program)
            else:
                check_train(payload, info, program)
        case OptimStep(adam):
            check_adam(adam)
        case SaveState(name=name, ttl_seconds=ttl):
            check_checkpoint_name(name)
            check_ttl(ttl)
        case SaveSampler(name=name, ttl_seconds=ttl):
            if name is not None:
                check_checkpoint_name(name)
            check_ttl(ttl)
        case SaveExternal(name, ttl, recipients):
            check_checkpoint_name(name)
            check_ttl(ttl)
            if recipients:
                age.check_recipients(recipients)
        case LoadState(path=path):
            parse(path)
        case _:
            pass
