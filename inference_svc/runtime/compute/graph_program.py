"""GraphProgram: a divided graph, ready to run: which value each part takes, returns and frees."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import GraphModule, Node

from inference_svc.runtime.compute.graph_pieces import Part, Run, weight_of


class Call(NamedTuple):
    """A part, and where its values are among all values of the graph.

    Attributes:
        run: see `Part`.
        arguments: weights and constants; where other values belong, None.
        places: position of each other argument, and which value it is.
        results: which values are returned: the first one, and the one behind the last.
        last_read: values that no later call reads.
    """

    run: Run
    arguments: tuple[Any, ...]
    places: tuple[tuple[int, int], ...]
    results: tuple[int, int]
    last_read: tuple[int, ...]


class GraphProgram:
    """The calls that compute a graph.

    Attributes:
        calls: in the order in which they run.
        num_values: number of values: first the graph's inputs, then what the calls return.
        answer: which value is the graph's result.
    """

    def __init__(self, calls: Sequence[Call], num_values: int, answer: int) -> None:
        """Store the calls, whose results are values one after the other."""
        self.calls = calls
        self.num_values = num_values
        self.answer = answer

    @classmethod
    def of(cls, whole: GraphModule, parts: Sequence[Part]) -> "GraphProgram":
        """Number the values of a divided graph.

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
        calls: list[Call] = []
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
            arguments = tuple(_kept(whole, read) for read in part.arguments)
            calls.append(Call(part.run, arguments, places, (first, len(numbers)), last_read))
        return cls(calls, len(numbers), numbers[answer])

    def run(self, *inputs: Tensor) -> Tensor:
        """Compute the graph's result; values are freed as soon as they were read last."""
        values: list[Any] = [*inputs, *[None] * (self.num_values - len(inputs))]
        for call in self.calls:
            arguments = list(call.arguments)
            for position, number in call.places:
                arguments[position] = values[number]
            first, end = call.results
            values[first:end] = call.run(*arguments)
            for number in call.last_read:
                values[number] = None
        answer: Tensor = values[self.answer]
        return answer


def _kept(whole: GraphModule, argument: Any) -> Any:
    """Return an argument that is the same in every run; None: it is another value."""
    if isinstance(argument, Node):
        return weight_of(whole, argument) if argument.op == "get_attr" else None
    return argument
