"""GraphProgram: a divided graph, ready to run: which values each part takes, returns and frees."""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import GraphModule, Node

from inference_svc.runtime.compute.graph_pieces import Part, Run, weight_of


class Call(NamedTuple):
    """A part, and its place among the program's values, by their numbers.

    Attributes:
        run: see `Part`.
        arguments: values that it takes.
        results: values that it returns: the first one, and the one behind the last.
        last_read: values that no later call takes, and that are not the same in every run.
    """

    run: Run
    arguments: tuple[int, ...]
    results: tuple[int, int]
    last_read: tuple[int, ...]


class GraphProgram:
    """The calls that compute a graph.

    Attributes:
        constants: the first values: weights, and all else that is the same in every run. The
            graph's inputs follow, and then what the calls return.
        calls: in the order in which they run.
        num_values: number of values.
        answer: which value is the graph's result.
    """

    def __init__(
        self, constants: Sequence[Any], calls: Sequence[Call], num_values: int, answer: int
    ) -> None:
        """Store the parts."""
        self.constants, self.calls = constants, calls
        self.num_values, self.answer = num_values, answer
        self._takes = [_getter(call.arguments) for call in calls]

    @classmethod
    def of(cls, whole: GraphModule, parts: Sequence[Part]) -> "GraphProgram":
        """Number the values of a divided graph.

        Args:
            whole: the graph; it returns one tensor.
            parts: from `divide`, perhaps with other functions to run.
        """
        constants: list[Any] = []
        numbers: dict[Any, int] = {}  # of nodes
        taken: list[list[int | Node]] = []  # by part: numbers, and nodes that have none yet
        for part in parts:
            taken.append([])
            for argument in part.arguments:
                if isinstance(argument, Node) and argument.op != "get_attr":
                    taken[-1].append(argument)
                elif isinstance(argument, Node):
                    if argument not in numbers:
                        numbers[argument] = len(constants)
                        constants.append(weight_of(whole, argument))
                    taken[-1].append(numbers[argument])
                else:
                    taken[-1].append(len(constants))
                    constants.append(argument)
        inputs = [node for node in whole.graph.nodes if node.op == "placeholder"]
        results = (node for part in parts for node in part.outputs)
        numbers |= {node: number for number, node in enumerate((*inputs, *results), len(constants))}
        last_readers = {
            read: index
            for index, reads in enumerate(taken)
            for read in reads
            if isinstance(read, Node)
        }
        calls: list[Call] = []
        end = len(constants) + len(inputs)
        for index, (part, reads) in enumerate(zip(parts, taken, strict=True)):
            first, end = end, end + len(part.outputs)
            arguments = tuple(numbers[read] if isinstance(read, Node) else read for read in reads)
            nodes = dict.fromkeys(read for read in reads if isinstance(read, Node))
            last_read = tuple(numbers[node] for node in nodes if last_readers[node] == index)
            calls.append(Call(part.run, arguments, (first, end), last_read))
        answer = next(iter(reversed(whole.graph.nodes))).args[0]
        return cls(constants, calls, end, numbers[answer])

    def run(self, *inputs: Tensor) -> Tensor:
        """Compute the graph's result; values are freed as soon as they were read last."""
        values: list[Any] = [*self.constants, *inputs]
        values += [None] * (self.num_values - len(values))
        for call, take in zip(self.calls, self._takes, strict=True):
            first, end = call.results
            values[first:end] = call.run(*take(values))
            for number in call.last_read:
                values[number] = None
        answer: Tensor = values[self.answer]
        return answer


def _getter(numbers: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """Return a function that takes values out of a list; a graph has hundreds of calls a step."""
    if len(numbers) > 1:
        return itemgetter(*numbers)
    return itemgetter(slice(numbers[0], numbers[0] + 1) if numbers else slice(0))
