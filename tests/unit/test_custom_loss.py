"""5.9: graphs from outside are refused with the node's name unless every part of them is on the allow-list."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from openrl.backends.torch.custom_loss import CustomLoss
from openrl.backends.torch.loss_budget import Limits
from openrl.custom_loss import MAX_BYTES, MAX_NODES, LossProgram
from openrl.custom_loss_ops import FUNCTIONS, METHODS
from openrl.errors import BadRequest
from openrl.losses import Loss
from openrl.wire.bodies import decode_custom_loss
from support import losses
from support.losses import graph

X = {"ref": "x"}
LP = np.array([-0.5, -1.5, -2.5], np.float32)


def decode(request: dict[str, Any]) -> LossProgram:
    return decode_custom_loss(json.dumps(request).encode())


def run(request: dict[str, Any], lp: Any = LP, limits: Limits = Limits()) -> Loss:
    return CustomLoss(decode(request), limits)(np.asarray(lp, np.float32), {}, backward=True)


def function(name: str, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return "call_function", "evil", name, list(args), kwargs


def method(name: str, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return "call_method", "evil", name, [X, *args], kwargs


@pytest.fixture(autouse=True)
def nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test of this module may leave a file or a thread."""
    monkeypatch.chdir(tmp_path)
    before = threading.active_count()
    yield
    assert threading.active_count() == before
    assert not list(tmp_path.iterdir())


HOSTILE = {
    "a class": function("getattr", X, "__class__"),
    "a chain": function("getattr", X, "__class__.__mro__"),
    "free attribute": function("getattr", X, "grad_fn"),
    "data of a leaf": function("getattr", X, "data"),
    "attribute by reference": function("getattr", X, X),
    "attribute with default": function("getattr", X, "shape", 1),
    "attribute of a constant": function("getattr", "x", "shape"),
    "attribute by keyword": function("getattr", X, name="shape"),
    "load": function("torch.load", "file"),
    "save": function("torch.save", X, "file"),
    "from_file": function("torch.from_file", "file"),
    "hub": function("torch.hub.load", "a/b", "c"),
    "system": function("os.system", "touch file"),
    "eval": function("builtins.eval", "1"),
    "import": function("builtins.__import__", "os"),
    "bare eval": function("eval", "1"),
    "methodcaller": function("operator.methodcaller", "item"),
    "attrgetter": function("operator.attrgetter", "__class__"),
    "setitem": function("operator.setitem", X, 0, 1.0),
    "in place operator": function("operator.iadd", X, 1),
    "shift": function("operator.lshift", 1, 60),
    "dunder": function("operator.__add__", X, 1),
    "apply": function("torch.utils._pytree.tree_map", X, X),
    "compile": function("torch.compile", X),
    "ops": function("torch.ops.aten.add", X, 1),
    "seed": function("torch.manual_seed", 1),
    "threads": function("torch.set_num_threads", 64),
    "random": function("torch.rand_like", X),
    "dropout": function("torch.nn.functional.dropout", X),
    "einsum": function("torch.functional.einsum", "i,i->", X, X),
    "tensor": function("torch.tensor", [1.0]),
    "as_strided": function("torch.as_strided", X, {"tuple": [9]}, {"tuple": [1]}),
    "factorial": function("math.factorial", 10**6),
    "item": method("item"),
    "numpy": method("numpy"),
    "tolist": method("tolist"),
    "backward": method("backward"),
    "hook": method("register_hook", X),
    "requires_grad_": method("requires_grad_"),
    "in place method": method("add_", 1),
    "set_": method("set_"),
    "apply_": method("apply_", X),
    "share": method("share_memory_"),
    "cuda": method("cuda"),
    "data_ptr": method("data_ptr"),
    "storage": method("untyped_storage"),
    "method dunder": method("__reduce_ex__", 2),
    "map": method("map_", X, X),
    "no object": ("call_method", "evil", "sum", []),
    "object by value": ("call_method", "evil", "sum", [3]),
    "out": function("torch.exp", X, out=X),
    "inplace": function("torch.nn.functional.relu", X, inplace=True),
    "unknown keyword": function("torch.sum", X, generator=1),
    "too many arguments": function("torch.exp", X, 1, 2),
    "a word": function("torch.sum", X, "dim"),
    "a word of another keyword": function("torch.nn.functional.mse_loss", X, X, reduction="__class__"),
    "norm of singular values": function("torch.functional.norm", X, p="nuc"),
    "another device": method("to", {"device": "cuda:0"}),
    "no device": method("to", {"device": "meta"}),
    "a complex type": method("to", {"dtype": "complex64"}),
    "a free constant": method("to", {"dtype": "load"}),
    "free kind": method("to", {"module": "os"}),
    "a dict": function("torch.exp", {"dict": {"a": 1}}),
    "two keys": function("torch.exp", {"ref": "x", "tuple": []}),
    "unknown number": function("torch.add", X, {"float": "1e999"}),
    "huge integer": function("torch.add", X, 2**63),
    "free slice": function("operator.getitem", X, {"slice": ["a", None, None]}),
    "long slice": function("operator.getitem", X, {"slice": [1, 2, 3, 4]}),
    "a later node": function("torch.exp", {"ref": "output"}),
    "itself": function("torch.exp", {"ref": "evil"}),
    "no node": function("torch.exp", {"ref": "y"}),
    "reference of a number": function("torch.exp", {"ref": 0}),
    "reference of a list": function("torch.exp", {"ref": ["x"]}),
    "module": ("call_module", "evil", "lin", [X]),
    "get_attr": ("get_attr", "evil", "weight", []),
    "another op": ("exec", "evil", "print(1)", []),
    "output twice": ("output", "evil", "output", []),
    "late placeholder": ("placeholder", "evil", "logprobs", []),
    "empty target": function("", X),
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_hostile_nodes_are_refused_by_name_when_the_loss_is_made(name: str) -> None:
    with pytest.raises(BadRequest, match="node 'evil'"):
        decode(graph(HOSTILE[name]))


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_deep_nesting() -> None:
    with pytest.raises(BadRequest, match=r"'evil'.*deep"):
        decode(graph(function("torch.stack", nested(40))))
    with pytest.raises(BadRequest):  # the parser's own limit
        decode_custom_loss(b'{"name":"x","inputs":[],"graph":{"nodes":' + b"[" * 5000 + b"]" * 5000 + b"}}")


def test_bounds_on_the_graph() -> None:
    chain = [("call_function", f"n{i}", "torch.exp", [X]) for i in range(MAX_NODES)]
    with pytest.raises(BadRequest, match=f"at most {MAX_NODES}"):
        decode(graph(*chain))
    with pytest.raises(BadRequest, match=r"'evil'.*values"):
        decode(graph(function("torch.stack", [X] * 30_000)))
    with pytest.raises(BadRequest, match="bytes"):
        decode_custom_loss(b" " * (MAX_BYTES + 1))


def test_names_are_unique_and_messages_short() -> None:
    with pytest.raises(BadRequest, match=r"'x'.*another node"):
        decode(graph(("call_function", "x", "torch.exp", [X])))
    with pytest.raises(BadRequest) as caught:
        decode(graph(("call_function", "n" * 5000, "t" * 5000, [X])))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"inputs": []}, "1..16"),
        ({"inputs": [{"name": "weights", "rank": 1}]}, "logprobs"),
        ({"inputs": [{"name": "logprobs", "rank": 0}]}, "rank 1 or 2"),
        ({"inputs": [{"name": "logprobs", "rank": 1}, {"name": "__class__", "rank": 7}]}, "rank"),
        ({"inputs": [{"name": "logprobs", "rank": 1}, {"name": "A.b", "rank": 1}]}, "must match"),
        ({"inputs": [{"name": "logprobs", "rank": 1}] * 2}, "same name"),
        ({"inputs": [{"name": "logprobs", "rank": 1}, {"name": "w", "rank": 1}]}, "placeholders come first|calls come"),
        ({"graph": {"format": 2, "nodes": []}}, "format"),
        ({"graph": {"format": 1, "nodes": []}}, "placeholders"),
        ({"name": None}, "name"),
    ],
)
def test_other_parts_of_the_request(change: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        decode(graph(function("torch.sum", X)) | change)


@pytest.mark.parametrize(
    "output",
    [
        X,
        {"tuple": [X]},
        {"tuple": [1.0, {"dict": {}}]},
        {"tuple": [{"ref": "nowhere"}, {"dict": {}}]},
        {"tuple": [X, {"dict": {"loss:sum": X}}]},
        {"tuple": [X, {"dict": {"custom/A:sum": X}}]},
        {"tuple": [X, {"dict": {"custom/a:max": X}}]},
        {"tuple": [X, {"dict": {"custom/a:sum": 1.0}}]},
        {"tuple": [X, {"dict": {f"custom/{i}:sum": X for i in range(100)}}]},
    ],
)
def test_the_output_is_a_loss_and_metrics(output: Any) -> None:
    request = graph(function("torch.sum", X))
    request["graph"]["nodes"][-1]["args"] = [output]
    with pytest.raises(BadRequest, match="'output'"):
        decode(request)


# ---- what only shows when it runs ----

BIG = 2**40
HEAVY: dict[str, list[tuple[Any, ...]]] = {
    "zeros": [function("torch.zeros", BIG)],
    "zeros of a shape": [function("torch.zeros", {"tuple": [2**20, 2**20]})],
    "overflowing shape": [function("torch.ones", 2**62, 2**62)],
    "full": [function("torch.full", {"tuple": [BIG]}, 1.0)],
    "arange": [function("torch.arange", BIG)],
    "fine arange": [function("torch.arange", 0, 1, 1e-12)],
    "linspace": [function("torch.linspace", 0, 1, BIG)],
    "new_zeros": [method("new_zeros", BIG)],
    "new_full": [method("new_full", {"tuple": [BIG]}, 1)],
    "repeat": [method("repeat", BIG)],
    "tile": [method("tile", {"tuple": [BIG]})],
    "interleave": [method("repeat_interleave", BIG)],
    "expand": [method("expand", BIG, 3)],
    "broadcast_to": [function("torch.broadcast_to", X, {"tuple": [BIG, 3]})],
    "pad": [function("torch.nn.functional.pad", X, {"tuple": [0, BIG]})],
    "one_hot": [("call_method", "ints", "long", [X]), function("torch._C._nn.one_hot", {"ref": "ints"}, BIG)],
    "power of an integer": [("call_method", "n", "size", [X, 0]), function("operator.pow", {"ref": "n"}, BIG)],
    "large integer": [("call_method", "n", "size", [X, 0]), function("operator.pow", {"ref": "n"}, 1000)],
    "root of a tensor": [function("math.sqrt", X)],
    "complex": [function("operator.pow", -1.5, 0.5)],
    "words": [function("operator.add", {"tuple": [1]}, {"tuple": [2]})],
    "sequence times": [function("operator.mul", [1, 2], BIG)],
    "tuple times": [("call_method", "n", "size", [X]), function("operator.mul", {"ref": "n"}, BIG)],
    "no such attribute": [("call_method", "n", "size", [X]), function("getattr", {"ref": "n"}, "T")],
    "method of a shape": [("call_method", "n", "size", [X]), ("call_method", "evil", "sum", [{"ref": "n"}])],
    "name of a type": [method("type")],
    "slice by tensor": [
        ("call_method", "n", "argmax", [X]),
        function("operator.getitem", X, {"slice": [{"ref": "n"}, None, None]}),
    ],
    "wrong shape": [function("torch.add", X, {"ref": "y"})],
    "past the end": [function("operator.getitem", X, 3)],
    "wrong type": [function("torch.sum", X, X)],
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(HEAVY))
def test_what_is_too_large_or_wrong_fails_by_name_and_at_once(name: str) -> None:
    calls = [("call_function", "y", "torch.zeros", [2]), *HEAVY[name]] if name == "wrong shape" else HEAVY[name]
    started = time.monotonic()
    with pytest.raises(BadRequest, match="node 'evil'"):
        run(graph(*calls))
    assert time.monotonic() - started < 1


def test_growth_by_doubling_and_by_broadcasting_ends() -> None:
    doubling = [("call_function", "n0", "torch.cat", [[X, X]])]
    doubling += [("call_function", f"n{i}", "torch.cat", [[{"ref": f"n{i - 1}"}] * 2]) for i in range(1, 200)]
    with pytest.raises(BadRequest, match=r"node 'n\d+' \(torch.cat\).*elements"):
        run(graph(*doubling))
    wide = np.zeros(2**13, np.float32)
    column = ("call_function", "c", "torch.unsqueeze", [X, 1])
    for evil in (function("torch.add", {"ref": "c"}, X), function("operator.mul", {"ref": "c"}, X)):
        with pytest.raises(BadRequest, match=r"'evil'.*elements"):
            run(graph(column, evil), wide)
    with pytest.raises(BadRequest, match=r"'evil'.*elements"):  # the result is one number, but not what is on the way
        run(graph(column, function("torch.nn.functional.mse_loss", {"ref": "c"}, X, reduction="sum")), wide)


def test_an_index_can_repeat_and_is_measured_first() -> None:
    calls = [
        ("call_function", "many", "torch.zeros", [2**20], {"dtype": {"dtype": "int64"}}),
        ("call_function", "rows", "torch.zeros", [3, 2**10]),
        function("operator.getitem", {"ref": "rows"}, {"tuple": [0, {"ref": "many"}]}),
    ]
    assert run(graph(*calls, ("call_method", "loss", "sum", [X]))).finite
    calls[-1] = function("operator.getitem", {"ref": "rows"}, {"tuple": [{"ellipsis": True}, None, {"ref": "many"}]})
    calls[1] = ("call_function", "rows", "torch.zeros", [2**8, 2**8])
    with pytest.raises(BadRequest, match=r"'evil'.*elements"):
        run(graph(*calls))
    mask = [
        ("call_function", "m", "operator.lt", [X, 0]),
        function("operator.getitem", X, {"tuple": [{"ref": "m"}] * 2}),
    ]
    with pytest.raises(BadRequest, match=r"'evil'.*mask"):
        run(graph(*mask))


def test_tuples_are_bounded_before_they_are_made() -> None:
    many = ("call_function", "z", "torch.zeros", [2**24])
    z = {"ref": "z"}
    for evil in (
        function("torch.unbind", z),
        function("torch.chunk", z, 2**24),
        function("torch.functional.split", z, 1),
        ("call_method", "evil", "split", [z, 100]),
    ):
        started = time.monotonic()
        with pytest.raises(BadRequest, match=r"'evil'.*parts"):
            run(graph(many, evil))
        assert time.monotonic() - started < 1


def test_products_are_bounded_by_their_work() -> None:
    long = [
        ("call_function", "a", "torch.zeros", [2**22, 1]),
        ("call_function", "b", "torch.zeros", [1, 2**22]),
    ]
    a, b = {"ref": "a"}, {"ref": "b"}
    swapped = function("torch.matmul", other=b, input=a)
    for evil in (function("torch.mm", a, b), function("operator.matmul", a, b), swapped, function("torch.inner", a, a)):
        with pytest.raises(BadRequest, match=r"'evil'.*elements"):
            run(graph(*long, evil))
    square = ("call_function", "s", "torch.zeros", [3000, 3000])
    with pytest.raises(BadRequest, match=r"'evil'.*multiplications"):
        run(graph(square, function("torch.matmul", {"ref": "s"}, {"ref": "s"})))


def test_the_sum_of_all_tensors_is_bounded() -> None:
    calls = [("call_function", f"z{i}", "torch.zeros", [2**22]) for i in range(30)]
    with pytest.raises(BadRequest, match=r"node 'z\d+'"):
        run(graph(*calls))


def test_time_is_bounded_over_all_datums_of_a_request() -> None:
    calls = [("call_function", f"s{i}", "torch.sort", [X]) for i in range(400)]
    loss = CustomLoss(decode(graph(*calls, ("call_method", "l", "sum", [X]))), Limits(seconds=0.3))
    lp = np.random.default_rng(0).random(20_000, np.float32)
    started = time.monotonic()

    def until_it_fails() -> None:
        while True:
            loss(lp, {}, backward=False)

    with pytest.raises(BadRequest, match=r"node 's.*more than 0.3 s"):
        until_it_fails()
    assert time.monotonic() - started < 3


def test_what_a_loss_returns() -> None:
    with pytest.raises(BadRequest, match="scalar"):
        run(graph(function("torch.exp", X)))
    with pytest.raises(BadRequest, match="scalar"):
        run(graph(("call_method", "n", "numel", [X])))
    with pytest.raises(BadRequest, match="does not depend"):
        run(graph(("call_method", "a", "detach", [X]), ("call_method", "b", "sum", [{"ref": "a"}])))
    with pytest.raises(BadRequest, match="differentiated"):
        run(graph(("call_function", "a", "torch.floor_divide", [X, 2]), ("call_method", "b", "sum", [{"ref": "a"}])))


def test_infinite_constants_are_data() -> None:
    """`{"float": "-inf"}` is in the language; what comes of it decides (L11)."""
    mask = ("call_function", "m", "operator.lt", [X, -2])
    filled = ("call_method", "f", "masked_fill", [X, {"ref": "m"}, {"float": "-inf"}])
    good = run(graph(mask, filled, ("call_function", "l", "torch.logsumexp", [{"ref": "f"}, 0])))
    assert good.finite
    assert good.grad[2] == 0
    assert not run(graph(mask, filled, ("call_method", "l", "sum", [{"ref": "f"}]))).finite


# ---- what is allowed ----


def test_every_allowed_name_exists_in_torch_and_none_of_them_is_in_place() -> None:
    for name in METHODS:
        assert hasattr(torch.Tensor, name)
    for name in [*METHODS, *FUNCTIONS]:
        assert not name.endswith("_") or name in {"operator.and_", "operator.or_"}
    forbidden = {"item", "tolist", "numpy", "backward", "data_ptr", "apply_", "set_", "share_memory_", "register_hook"}
    assert not forbidden & {name.rpartition(".")[2] for name in [*METHODS, *FUNCTIONS]}


@pytest.mark.parametrize("name", sorted(losses.LOSSES))
def test_losses_as_the_sdk_traces_them_give_what_the_function_gives(name: str) -> None:
    fn, ranks = losses.LOSSES[name]
    rng = np.random.default_rng(3)
    shape = (12,) if ranks["logprobs"] == 1 else (12, 4)
    lp = -rng.random(shape, np.float32) * 4
    inputs: dict[str, Any] = {}
    for key, rank in list(ranks.items())[1:]:
        inputs[key] = rng.normal(0, 1, {0: (1,), 1: shape[:1], 2: shape}[rank]).astype(np.float32)
    if "target_tokens" in inputs:
        inputs["target_tokens"] = rng.integers(0, 97, shape)
    found = CustomLoss(losses.program(fn, ranks))(lp, inputs, backward=True)
    leaf = torch.tensor(lp, requires_grad=True)
    given = [torch.tensor(v).reshape(()) if ranks[k] == 0 else torch.tensor(v) for k, v in inputs.items()]
    loss, metrics = fn(leaf, *given)
    loss.backward()
    assert leaf.grad is not None
    np.testing.assert_array_equal(found.grad, leaf.grad.numpy())
    assert found.total == float(loss.detach())
    assert found.sums == {key: float(value.detach()) for key, value in metrics.items()}


def test_running_losses_draws_in_no_compiler() -> None:
    """PyTorch's own shape tools import 800 modules at their first use, which a worker would feel for seconds."""
    code = (
        "import sys, numpy as np; sys.path.insert(0, sys.argv[1])\n"
        "from support import losses; from openrl.backends.torch.custom_loss import CustomLoss\n"
        "before = set(sys.modules)\n"
        "fn, ranks = losses.LOSSES['distilled']; program = losses.program(fn, ranks); before |= set(sys.modules)\n"
        "CustomLoss(program)(np.zeros((3, 2), np.float32), {'teacher': np.ones((3, 2), np.float32)}, backward=True)\n"
        "sys.exit(str(set(sys.modules) - before) if len(set(sys.modules) - before) > 5 else 0)"
    )
    tests = str(Path(__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code, tests], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
