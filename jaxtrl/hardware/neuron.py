"""Lint: which operations of a program do not run on Trainium (DESIGN.md section 11). Needs no Trainium.

The jaxpr is searched, since there a `scan` still differs from a `while_loop` and every operation has its source line;
then the program is lowered for platform `neuron` and the StableHLO is searched for what only lowering brings in.
"""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal


class Finding(NamedTuple):
    """An operation that Neuron does not run, its source line ("file:line (function)"), and what to do instead."""

    operation: str
    source: str
    instead: str

    def __str__(self) -> str:
        return f"{self.source}: {self.operation}: {self.instead}"


PLATFORMS = ("neuron",)
_HOST = "compute it on the host (NumPy) and pass it in"
_CALLBACK = "return the value from the step as a metric"
_FORBIDDEN = {
    "cond": "use jnp.where, or decide on the host",
    "while": "use lax.scan with a static length",
    "sort": "use bisection on a threshold, or sort on the host",
    "top_k": "use bisection on a threshold, or the host",
    "approx_top_k": "use bisection on a threshold, or the host",
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _HOST),
    **dict.fromkeys(("debug_callback", "debug_print", "pure_callback", "io_callback", "check"), _CALLBACK),
    **dict.fromkeys(("threefry2x32", "random_bits", "random_seed", "random_wrap"), "draw it on the host (NumPy)"),
    "reduce_precision": "cast with astype",
    **dict.fromkeys(
        ("scatter", "scatter-mul", "scatter-min", "scatter-max"), "write with dynamic_update_slice or where"
    ),
}
_SUMS_ACROSS = ("psum", "psum_invariant", "reduce_scatter", "all_reduce", "unreduced_psum")
_MASKING = ("select_n", "broadcast_in_dim", "pjit", "jit")  # jnp.where is a jit of its own
_WIDE = ("int64", "uint64", "float64", "complex64", "complex128")
_LOWERED = {
    r"\bstablehlo\.case\b": "cond",
    r"\bstablehlo\.sort\b": "sort",
    r"\bchlo\.top_k\b": "top_k",
    r"\bstablehlo\.reduce_window\b": "cumsum",
    r"\bstablehlo\.reduce_precision\b": "reduce_precision",
    r"stablehlo\.custom_call @(?!Sharding|SPMD|xla\.sdy)[\w.]+": "custom_call",
    r"tensor<[^>]*(?:f64|complex<)": "64-bit",
}


def lint(jitted: Any, *args: Any, **kwargs: Any) -> list[Finding]:
    """What keeps `jitted` (a jax.jit object) from running on Neuron, each (operation, source line) once; [] if nothing.

    Arguments may be `jax.ShapeDtypeStruct`s. Nothing is compiled or run. An operation that cannot be lowered for
    Neuron at all is a finding too.
    """
    traced = jitted.trace(*args, **kwargs)
    found = list(_search(traced.jaxpr.jaxpr))
    try:
        text = traced.lower(lowering_platforms=PLATFORMS).as_text()
    except (NotImplementedError, ValueError) as error:
        if not found:
            found.append(Finding("lowering", "the whole program", str(error).splitlines()[0]))
        return _once(found)
    known = {finding.operation for finding in found}
    for pattern, operation in _LOWERED.items():
        match = re.search(pattern, text)
        if match and operation not in known:
            found.append(Finding(operation, "the lowered program", f"it contains `{match[0]}`"))
    return _once(found)


@contextmanager
def as_on_neuron() -> Iterator[None]:
    """Code of jaxtrl that asks for the backend is told that it is Neuron, so that what is traced here is what runs
    there (bfloat16, attention tables without computed loop ends). Nothing must be compiled for its speed in it."""
    with mock.patch.object(jax, "default_backend", return_value="neuron"):
        yield


def _once(found: list[Finding]) -> list[Finding]:
    return list(dict.fromkeys(found))


def _search(jaxpr: Jaxpr, caller: str = "") -> Iterator[Finding]:
    """`caller`: the line that runs this sub-program; functions of JAX that are jitted themselves have none inside."""
    for eqn in jaxpr.eqns:
        source = source_info_util.summarize(eqn.source_info) or caller
        for operation, instead in _problems(eqn):
            yield Finding(operation, source, instead)
        for value in eqn.params.values():
            yield from _search_value(value, source)


def _search_value(value: Any, caller: str) -> Iterator[Finding]:
    if isinstance(value, ClosedJaxpr):
        yield from _search(value.jaxpr, caller)
    elif isinstance(value, Jaxpr):
        yield from _search(value, caller)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _search_value(item, caller)


def _problems(eqn: JaxprEqn) -> Iterator[tuple[str, str]]:
    """(operation, what to do instead) of everything wrong with one equation, sub-programs left out."""
    name = eqn.primitive.name
    dtype = _dtype(eqn.invars[0]) if eqn.invars else np.dtype(np.float32)
    integer = jnp.issubdtype(dtype, jnp.integer) or dtype == np.bool_
    if name in _FORBIDDEN:
        yield name, _FORBIDDEN[name]
    elif name in _SUMS_ACROSS and any(jnp.issubdtype(_dtype(x), jnp.integer) for x in eqn.invars):
        yield f"integer {name}", "cast counts to float32 before the sum over devices"
    elif name == "dot_general" and integer:
        yield "integer dot_general", "cast to float32"
    elif name == "reduce" and len(eqn.invars) > 2:
        yield "variadic reduce", "use separate reductions"
    elif name == "gather" and _picks_elements(eqn):
        yield "gather of single elements", "use sum(where(iota == index, values, 0))"
    elif name == "scatter-add" and (integer or not _adds_rows(eqn)):
        yield "scatter-add of " + ("integers" if integer else "single elements"), "use an iota-compare matmul"
    elif name in ("sin", "cos") and dtype == jnp.bfloat16:
        yield f"bfloat16 {name}", "compute it in float32"
    elif name.startswith("reduce_window"):
        yield name, _HOST
    if name in _MASKING and any(_minus_infinity(x) for x in eqn.invars):
        yield "minus infinity", "use a large finite negative number"
    for kind in {str(_dtype(x)) for x in eqn.outvars}:
        if kind in _WIDE or kind.startswith("float8"):
            yield f"{kind} array", "use float32, bfloat16 or int32"


def _dtype(x: Any) -> Any:
    return getattr(x.aval, "dtype", np.dtype(np.float32))  # tokens have none


def _shape(x: Any) -> tuple[int, ...]:
    return x.aval.shape


def _minus_infinity(x: Any) -> bool:
    return isinstance(x, Literal) and jnp.issubdtype(_dtype(x), jnp.floating) and bool(np.all(x.val == -np.inf))


def _picks_elements(eqn: JaxprEqn) -> bool:
    """Single entries of a matrix, not whole rows (of a vector, an entry is a row)."""
    shape = [size for size in _shape(eqn.invars[0]) if size > 1]
    return len(shape) > 1 and math.prod(eqn.params["slice_sizes"]) == 1


def _adds_rows(eqn: JaxprEqn) -> bool:
    """Every update covers all axes of the operand but the indexed ones, and there are such axes."""
    numbers, shape = eqn.params["dimension_numbers"], _shape(eqn.invars[0])
    indexed = {*numbers.inserted_window_dims, *numbers.operand_batching_dims, *numbers.scatter_dims_to_operand_dims}
    rows = [size for axis, size in enumerate(shape) if axis not in indexed]
    window = [_shape(eqn.invars[2])[axis] for axis in numbers.update_window_dims]
    return math.prod(rows) > 1 and math.prod(window) == math.prod(rows)
