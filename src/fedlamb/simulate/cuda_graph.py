"""CUDA graphs: a program that is the same in many rounds is recorded once and then replayed.

A program of small kernels spends nearly all of its time on being launched; a graph launches them
all at once.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..randomness import kept_random_state
from .nested import Structure, tree_flatten, tree_unflatten

Program = Callable[[Any], Any]
_MOST = 8  # programs kept; a federation has two or three
_STALE = 64  # calls after which one that was not used gives its place to another


class Replayed:
    """Runs pure programs on trees of tensors, from the second time on as a graph.

    Products of matrices keep scratch memory for each stream that they are recorded on, so graphs
    that may run side by side are recorded on streams of their own.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._graphs: dict[Any, _Graph | None] = {}
        self._used: dict[Any, int] = {}
        self._calls = 0

    def __call__(self, key: Any, program: Program, inputs: Any) -> Any:
        """What the program gives for these inputs; it works on copies of them, and gives copies."""
        outputs, structure = self._outputs(key, program, *tree_flatten(inputs))
        own = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in outputs]
        _write(own, outputs)  # the next call writes over a graph's outputs
        return tree_unflatten(own, structure)

    def _outputs(
        self, key: Any, program: Program, tensors: list[Tensor], structure: Structure
    ) -> tuple[list[Tensor], Structure]:
        whole = (key, structure, tuple((t.shape, t.dtype) for t in tensors))
        self._calls += 1
        self._used[whole] = self._calls
        if whole not in self._graphs:
            # The first time is a plain run: some programs, such as round 1, never come again.
            self._graphs[whole] = None
            return tree_flatten(program(tree_unflatten([t.clone() for t in tensors], structure)))
        graph = self._graphs[whole]
        if graph is None:
            if not self._has_room():
                given = [t.clone() for t in tensors]
                return tree_flatten(program(tree_unflatten(given, structure)))
            if self._stream is None:
                self._stream = torch.cuda.Stream(tensors[0].device)  # type: ignore[no-untyped-call]
            graph = _Graph.record(program, tensors, structure, self._stream)
            self._graphs[whole] = graph
        _write(graph.inputs, tensors)
        graph.graph.replay()
        return graph.outputs, graph.structure

    def _has_room(self) -> bool:
        recorded = [key for key, graph in self._graphs.items() if graph is not None]
        if len(recorded) < _MOST:
            return True
        oldest = min(recorded, key=self._used.__getitem__)
        if self._calls - self._used[oldest] < _STALE:
            return False
        self.clear()  # all of them, since they share scratch memory
        return True

    def clear(self) -> None:
        """Forgets all graphs and gives their memory back."""
        self._graphs.clear()


def _write(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Each source into its target, in one call for all numbers of a kind: a call for several
    kinds would copy them one by one."""
    pairs: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        some = pairs.setdefault(target.dtype, ([], []))
        some[0].append(target)
        some[1].append(source)
    for some in pairs.values():
        torch._foreach_copy_(*some)


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: list[Tensor]
    structure: Structure

    @staticmethod
    def record(
        program: Program, tensors: list[Tensor], structure: Structure, stream: torch.cuda.Stream
    ) -> "_Graph":
        inputs = [t.clone() for t in tensors]
        with kept_random_state(inputs[0].device):
            program(tree_unflatten(inputs, structure))  # compiles, warms up what libraries keep
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            found = program(tree_unflatten(inputs, structure))
        outputs, of = tree_flatten(found)
        return _Graph(graph, inputs, outputs, of)
