"""GraphProgram: a divided graph, ready to run: which value each part takes, returns and frees."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import GraphModule, Node

from inference_svc.runtime.compute.graph_pieces import Part, Run, tensor_of


class _Call(NamedTuple):
    """A part, and where its values are among all values of the graph.

    Attributes:
        run: see `Part`.
        arguments: weights and constants; where other values belong, anything.
        places: position of each other argument, and which value it is.
        results: which values are returned.
        last_read: values that no later call reads.
    """

    run: Run
    arguments: tuple[Any, ...]
    places: tuple[tuple[int, int], ...]
    results: slice
    last_read: tuple[int, ...]


class GraphProgram:
    """The calls that compute a graph."""

    def __init__(self, whole: GraphModule, parts: Sequence[Part]) -> None:
        """Number the values: first the graph's inputs, then what the parts return.

        Args:
            whole: the graph; it returns one tensor.
            parts: from `divide`, perhaps with other functions to run.
        """
        inputs = [node for node in whole.graph.nodes if node.op == "placeholder"]
        numbers: dict[Any, int] = {node: number for number, node in enumerate(inputs)}
        answer = next(iter(reversed(whole.graph.nodes))).args[0]
        last_readers = {
            read: part for part in parts for read in part.arguments if isinstance(read, Node)
        }
        self._calls: list[_Call] = []
        for part in parts:
            reads = [
                (position, read)
                for position, read in enumerate(part.arguments)
                if isinstance(read, Node) and read in numbers
            ]
            places = tuple((position, numbers[read]) for position, read in reads)
            last_read = tuple({numbers[read] for _, read in reads if last_readers[read] is part})
            first = len(numbers)
            numbers |= {node: first + number for number, node in enumerate(part.outputs)}
            weights = tuple(
                tensor_of(whole, read) if isinstance(read, Node) and read.op == "get_attr" else read
                for read in part.arguments
            )
            results = slice(first, len(numbers))
            self._calls.append(_Call(part.run, weights, places, results, last_read))
        self._num_values = len(numbers)
        self._answer = numbers[answer]

    def run(self, *inputs: Tensor) -> Tensor:
        """Compute the graph's result; values are freed as soon as they were read last."""
        values: list[Any] = [*inputs, *[None] * (self._num_values - len(inputs))]
        for call in self._calls:
            arguments = list(call.arguments)
            for position, number in call.places:
                arguments[position] = values[number]
            values[call.results] = call.run(*arguments)
            for number in call.last_read:
                values[number] = None
        answer: Tensor = values[self._answer]
        return answer
