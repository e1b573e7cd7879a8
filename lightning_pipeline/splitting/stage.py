"""A part of a program as a Python function over the original modules."""

from __future__ import annotations

import itertools
import keyword
import linecache
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_pipeline.splitting.ambient import restored
from lightning_pipeline.splitting.ir import Node, StateRef, TreeRef, ValueRef, value_refs
from lightning_pipeline.splitting.program import Program
from lightning_pipeline.splitting.torch_private import pytree

_serial = itertools.count()


class StageFunction:
    """Pieces ``lo`` to ``hi`` of a program, as a callable.

    Args:
        program: The recording.
        lo: First piece.
        hi: One past the last piece; the number of pieces to get the call's output.

    Attributes:
        positions: Which leaves of the call's arguments the part reads.
        function: The part itself, with the arguments of a call of this object.
        source: Its Python source; tracebacks show it.
    """

    def __init__(self, program: Program, lo: int, hi: int) -> None:
        self.program, self.lo, self.hi = program, lo, hi
        takes, gives = program.live[lo] if lo else [], program.live[hi]
        ends = hi == program.num_pieces
        placed = set(program.pieces[lo:hi])
        results = [ref.id for ref in value_refs(program.output_metas)] if ends else list(gives)
        nodes, inputs = _needed(program, placed, set(takes), results)
        self.positions = frozenset(at for at, value in program.inputs if value in inputs)
        writer = _Writer(program)
        self.source = writer.write(nodes, takes, inputs, results, ends)
        file = f"<stage {lo}:{hi} of {type(program.module).__name__} #{next(_serial)}>"
        linecache.cache[file] = (len(self.source), None, self.source.splitlines(True), file)
        weakref.finalize(self, linecache.cache.pop, file, None)
        exec(compile(self.source, file, "exec"), writer.names)
        self.function: Callable[[tuple[Tensor, ...], list[Any]], Any] = writer.names["stage"]

    def __call__(self, carried: tuple[Tensor, ...], inputs: list[Any]) -> Any:
        """Run the part.

        Args:
            carried: The tensors of ``program.live[lo]``.
            inputs: Leaves of the call's ``(args, kwargs)``.

        Returns:
            The tensors of ``program.live[hi]``, or the call's output at the end of the program.
        """
        return self.function(carried, inputs)


def _needed(
    program: Program, placed: set[int], carried: set[int], results: list[int]
) -> tuple[list[Node], list[int]]:
    """The nodes to run, local ones included, and the inputs to read."""
    wanted = [value for index in placed for value in program.nodes[index].operands] + results
    nodes, inputs = set(placed), set()
    while wanted:
        value = wanted.pop()
        index = program.values[value].node
        if value in carried or index in nodes:
            continue
        if index < 0:
            inputs.add(value)
        else:
            assert program.values[value].local, f"value {value} is not carried"
            nodes.add(index)
            wanted += program.nodes[index].operands
    return [program.nodes[index] for index in sorted(nodes)], sorted(inputs)


class _Writer:
    """Writes the source of a part; what has no literal becomes a global of the function."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.names: dict[str, Any] = {
            "_leaves": pytree.tree_leaves,
            "_unflatten": pytree.tree_unflatten,
            "_ambient": restored,
            "_checkpoint": checkpoint,
        }
        self._modules: dict[str, str] = {}

    def write(
        self,
        nodes: list[Node],
        takes: list[int],
        inputs: list[int],
        results: list[int],
        ends: bool,
    ) -> str:
        """The source of ``stage(carried, inputs)``."""
        lines = ["def stage(carried, inputs):"]
        if takes:
            lines.append(f"    {self._values(takes)} = carried")
        position = {value: place for place, value in self.program.inputs}
        lines += [f"    v{value} = inputs[{position[value]}]" for value in inputs]
        lines.append("    del carried, inputs")
        last_use = {value: k for k, node in enumerate(nodes) for value in node.operands}
        kept = set(results)
        for k, node in enumerate(nodes):
            lines += self._statement(node)
            made = [value for _, value in node.outputs if value not in last_use]
            used = [value for value in last_use if last_use[value] == k]
            if dead := [value for value in (*used, *made) if value not in kept]:
                lines.append("    del " + ", ".join(f"v{value}" for value in dead))
        if ends:
            output = ", ".join(map(self._expression, self.program.output_metas))
            spec = self._constant(self.program.output_spec, "s")
            lines.append(f"    return _unflatten([{output}], {spec})")
        else:
            lines.append(f"    return ({self._values(results)})")
        return "\n".join(lines) + "\n"

    def _values(self, values: list[int]) -> str:
        return "".join(f"v{value}, " for value in values).rstrip()

    def _statement(self, node: Node) -> list[str]:
        lines, indent = [], "    "
        if node.ambient:
            lines.append(f"    with _ambient({self._constant(node.ambient, 'a')}):")
            indent *= 2
        call, comment = self._call(node), self._comment(node)
        if not node.outputs:
            lines.append(f"{indent}{call}{comment}")
        elif node.single:
            lines.append(f"{indent}v{node.outputs[0][1]} = {call}{comment}")
        else:
            lines.append(f"{indent}_t = _leaves({call}){comment}")
            parts = "; ".join(f"v{value} = _t[{place}]" for place, value in node.outputs)
            lines.append(f"{indent}{parts}; del _t")
        return lines

    def _call(self, node: Node) -> str:
        if isinstance(node.target, str):
            target = self._module(node.target)
        else:
            target = self._constant(node.target, "f")
        arguments = [self._expression(arg) for arg in node.args]
        arguments += [
            f"{key}={self._expression(value)}"
            if _is_attribute(key)
            else f"**{{{key!r}: {self._expression(value)}}}"
            for key, value in node.kwargs.items()
        ]
        if node.checkpoint is not None:
            arguments = [target, *arguments, f"**{self._constant(node.checkpoint, 'k')}"]
            target = "_checkpoint"
        return f"{target}({', '.join(arguments)})"

    def _comment(self, node: Node) -> str:
        if isinstance(node.target, str):
            what = node.target
        else:
            what = f"{getattr(node.target, '__name__', node.target)} in {node.where or 'forward'}"
        if node.location is None:
            return f"  # {what}"
        return f"  # {what}, {Path(node.location[0]).name}:{node.location[1]}"

    def _expression(self, x: Any) -> str:
        if isinstance(x, ValueRef):
            return f"v{x.id}"
        if isinstance(x, StateRef):
            owner, _, key = x.name.rpartition(".")
            module = self._module(owner)
            return f"{module}.{key}" if _is_attribute(key) else f"getattr({module}, {key!r})"
        if x is None or type(x) in (bool, int, str) or (type(x) is float and math.isfinite(x)):
            return repr(x)
        if type(x) is list:
            return "[" + ", ".join(map(self._expression, x)) + "]"
        if type(x) is tuple:
            return "(" + "".join(f"{self._expression(part)}, " for part in x) + ")"
        if type(x) is dict:
            pairs = (f"{self._expression(k)}: {self._expression(v)}" for k, v in x.items())
            return "{" + ", ".join(pairs) + "}"
        if isinstance(x, slice):
            return f"slice({', '.join(map(self._expression, (x.start, x.stop, x.step)))})"
        if isinstance(x, TreeRef):
            leaves = ", ".join(map(self._expression, x.leaves))
            return f"_unflatten([{leaves}], {self._constant(x.spec, 's')})"
        return self._constant(x, "c")

    def _constant(self, x: Any, prefix: str) -> str:
        name = f"{prefix}{len(self.names)}"
        self.names[name] = x
        return name

    def _module(self, name: str) -> str:
        if name not in self._modules:
            module = self.program.module.get_submodule(name)
            self._modules[name] = self._constant(module, "m")
        return self._modules[name]


def _is_attribute(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)
