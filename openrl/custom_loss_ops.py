"""What a custom loss may call: PyTorch functions, tensor methods, operators and attributes, by their traced names.

A loss comes from outside, so this is a list of what is allowed, not of what is forbidden. It has nothing that changes
its operands (`mul_`, `out=`), draws random numbers, gives values to Python (`item`), or reaches files and devices.
Every name, also every keyword, is spelled out here; the names of a graph are only ever looked up in these tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from types import MappingProxyType
from typing import Any


class Growth(Enum):
    """How large a result can be, which must be known before it is made."""

    NONE = auto()  # no larger than the largest operand
    BROADCAST = auto()  # the operands' shapes broadcast together
    SIZED = auto()  # by a rule of the function's own
    PARTS = auto()  # a tuple of views, one for each row or block of rows
    PRODUCT = auto()  # a matrix product, whose work is the result times the inner dimension
    GUARDED = auto()  # attributes and items: the interpreter judges them itself; mathematics on numbers


@dataclass(frozen=True, slots=True)
class Operation:
    """`positional` names the arguments in order, `keywords` all that may be given by name.

    `variadic`: any number of further positional arguments, as in `x.view(2, 3)`.
    """

    positional: tuple[str, ...]
    keywords: frozenset[str]
    growth: Growth
    variadic: bool = False


# Keywords that tracing writes out although they say nothing: they may only have this value, and are dropped.
NEUTRAL: Mapping[str, Any] = MappingProxyType(
    {"out": None, "inplace": False, "size_average": None, "reduce": None, "requires_grad": False, "pin_memory": False}
)
IGNORED = frozenset({"_stacklevel"})
# The only strings that a call may be given, and only by these keywords.
STRINGS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "reduction": frozenset({"none", "sum", "mean", "batchmean"}),
        "rounding_mode": frozenset({"floor", "trunc"}),
        "mode": frozenset({"constant"}),
        "approximate": frozenset({"none", "tanh"}),
        "p": frozenset({"fro"}),
    }
)
CONSTANTS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "dtype": frozenset({"float16", "bfloat16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64"})
        | {"bool"},
        "device": frozenset({"cpu"}),
        "layout": frozenset({"strided"}),
        "memory_format": frozenset({"contiguous_format", "preserve_format"}),
    }
)
ATTRIBUTES = frozenset({"shape", "ndim", "dtype", "device", "T", "mT", "values", "indices"})

# A line: name, positional arguments, "*" if any number of more may follow, "|" and arguments given only by name.
# Lines of the "both" tables are functions `torch.<name>` of an input and methods of it.

_BOTH_NONE = """
abs, absolute, neg, negative, positive, exp, exp2, expm1, log, log2, log10, log1p, sqrt, rsqrt, square, reciprocal,
sign, sgn, sigmoid, tanh, sin, cos, sinh, cosh, asin, acos, atan, erf, erfc, lgamma, digamma, relu, floor, ceil,
trunc, frac, isfinite, isnan, isinf, isneginf, isposinf, logical_not, bitwise_not, detach, t, trace, numel, dim
round | decimals
logit eps
nan_to_num nan posinf neginf
softmax, log_softmax, cumsum, cumprod dim dtype
logsumexp, amax, amin, any, all, argmax, argmin, median dim keepdim
sum, mean, nansum, nanmean, prod dim keepdim | dtype
var, std dim unbiased keepdim | correction
aminmax | dim keepdim
count_nonzero, cummax, cummin, logcumsumexp, squeeze, unsqueeze dim
flip, permute *dims
roll shifts dims
diff | dim
sort dim descending | stable
argsort dim descending | stable
topk k dim largest sorted
reshape *shape
flatten start_dim end_dim
transpose dim0 dim1
movedim source destination
narrow dim start length
select dim index
diagonal offset dim1 dim2
tril, triu diagonal
clone | memory_format
scatter dim index src | value
scatter_add dim index src
index_add dim index source | alpha
"""

_BOTH_BROADCAST = """
add, sub, subtract other | alpha
mul, multiply, true_divide, remainder, fmod, floor_divide, maximum, minimum, fmax, fmin, atan2, hypot, logaddexp,
xlogy, eq, ne, lt, le, gt, ge, logical_and, logical_or, logical_xor, bitwise_and, bitwise_or, bitwise_xor other
div, divide other | rounding_mode
pow exponent
max, min dim keepdim | other
heaviside values
lerp end weight
addcmul, addcdiv tensor1 tensor2 | value
clamp, clip min max
clamp_min min
clamp_max max
masked_fill mask value
masked_select mask
"""

_BOTH_SIZED = """
broadcast_to size
tile *dims
repeat_interleave repeats dim
gather dim index
take index
index_select dim index
diag diagonal
outer vec2
"""

_BOTH_PARTS = """
unbind dim
chunk chunks dim
split split_size_or_sections dim
"""

_BOTH_PRODUCT = """
dot tensor
vdot, inner, matmul other
mm, bmm mat2
mv vec
"""

_METHODS_NONE = """
norm p dim keepdim dtype
view *shape
view_as, reshape_as, type_as other
contiguous | memory_format
float, double, half, bfloat16, long, int, bool | memory_format
type dtype
to target dtype | other device non_blocking copy memory_format
size dim
"""

_METHODS_BROADCAST = """
where condition other
"""

_METHODS_SIZED = """
expand, repeat *sizes
expand_as other
new_zeros, new_ones *size | dtype device layout
new_full size fill_value | dtype device layout
"""

_FUNCTIONS_NONE = """
operator.neg, operator.pos, operator.abs, operator.invert a
torch.zeros_like, torch.ones_like input | dtype device layout memory_format
torch.full_like input fill_value | dtype device layout memory_format
torch.functional.norm input p dim keepdim dtype
torch.var_mean, torch.std_mean input dim unbiased keepdim | correction
torch.functional.atleast_1d tensors
torch._C._linalg.linalg_norm input | keepdim dtype
torch._C._linalg.linalg_vector_norm x ord dim keepdim | dtype
torch._C._nn.log_sigmoid input
torch._C._nn.softplus input beta threshold
torch._C._nn.gelu input | approximate
torch._C._special.special_expit input
torch._C._special.special_log_softmax input dim | dtype
torch.nn.functional.relu, torch.nn.functional.relu6, torch.nn.functional.silu, torch.nn.functional.softsign input
torch.nn.functional.elu input alpha
torch.nn.functional.leaky_relu input negative_slope
torch.nn.functional.hardtanh input min_val max_val
torch.nn.functional._threshold input threshold value
torch.nn.functional.softmax, torch.nn.functional.log_softmax, torch.nn.functional.softmin input dim | dtype
torch.nn.functional.normalize input p dim eps
"""

_FUNCTIONS_BROADCAST = """
operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow a b
operator.and_, operator.or_, operator.xor, operator.eq, operator.ne, operator.lt, operator.le, operator.gt,
operator.ge a b
torch.where condition input other
torch.rsub input other | alpha
torch.cosine_similarity x1 x2 dim eps
torch._C._special.special_xlogy input other
torch.nn.functional.mse_loss, torch.nn.functional.l1_loss input target | reduction weight
torch.nn.functional.smooth_l1_loss input target | reduction beta
torch.nn.functional.huber_loss input target | reduction delta weight
torch.nn.functional.kl_div input target | reduction log_target
torch.nn.functional.binary_cross_entropy input target | weight reduction
torch.nn.functional.binary_cross_entropy_with_logits input target | weight reduction pos_weight
"""

_FUNCTIONS_SIZED = """
torch.cat, torch.concat, torch.concatenate, torch.stack tensors dim
torch.hstack, torch.vstack tensors
torch.nn.functional.pad input pad | mode value
torch._C._nn.one_hot tensor num_classes
torch.zeros, torch.ones *size | dtype device layout
torch.full size fill_value | dtype device layout
torch.arange start end step | dtype device layout
torch.linspace start end steps | dtype device layout
"""

_FUNCTIONS_PARTS = """
torch.functional.split input split_size_or_sections dim
"""

_FUNCTIONS_PRODUCT = """
operator.matmul a b
"""

# Numbers of a trace are shapes and what is computed of them, so mathematics on them is about scalars only.
_FUNCTIONS_GUARDED = """
getattr object name
operator.getitem a b
math.sqrt, math.exp, math.log, math.log2, math.log10, math.log1p, math.expm1, math.tanh, math.fabs x
math.floor, math.ceil x
math.pow x y
"""


def _read(table: str, growth: Growth) -> Iterator[tuple[str, Operation]]:
    """The lines of a table; a line that ends with a comma goes on in the next."""
    for line in table.replace(",\n", ", ").strip().splitlines():
        words, _, named = line.partition("|")
        names, _, arguments = words.strip().rpartition(", ") if ", " in words else ("", "", words.strip())
        first, *positional = arguments.split()
        variadic = any(word.startswith("*") for word in positional)
        bare = tuple(word.lstrip("*") for word in positional)
        operation = Operation(bare, frozenset({*bare, *named.split()}), growth, variadic)
        for name in [*filter(None, (part.strip() for part in names.split(","))), first]:
            yield name, operation


def _tables() -> tuple[dict[str, Operation], dict[str, Operation]]:
    functions: dict[str, Operation] = {}
    methods: dict[str, Operation] = {}
    both = (
        (_BOTH_NONE, Growth.NONE),
        (_BOTH_BROADCAST, Growth.BROADCAST),
        (_BOTH_SIZED, Growth.SIZED),
        (_BOTH_PARTS, Growth.PARTS),
        (_BOTH_PRODUCT, Growth.PRODUCT),
    )
    for table, growth in both:
        for name, operation in _read(table, growth):
            methods[name] = operation
            functions[f"torch.{name}"] = replace(
                operation,
                positional=("input", *operation.positional),
                keywords=operation.keywords | {"input"},
            )
    for table, growth in (
        (_METHODS_NONE, Growth.NONE),
        (_METHODS_BROADCAST, Growth.BROADCAST),
        (_METHODS_SIZED, Growth.SIZED),
    ):
        methods.update(_read(table, growth))
    for table, growth in (
        (_FUNCTIONS_NONE, Growth.NONE),
        (_FUNCTIONS_BROADCAST, Growth.BROADCAST),
        (_FUNCTIONS_SIZED, Growth.SIZED),
        (_FUNCTIONS_PARTS, Growth.PARTS),
        (_FUNCTIONS_PRODUCT, Growth.PRODUCT),
        (_FUNCTIONS_GUARDED, Growth.GUARDED),
    ):
        functions.update(_read(table, growth))
    del functions["torch.dim"]  # there is no such function
    return functions, methods


_FUNCTIONS, _METHODS = _tables()
FUNCTIONS: Mapping[str, Operation] = MappingProxyType(_FUNCTIONS)
METHODS: Mapping[str, Operation] = MappingProxyType(_METHODS)
