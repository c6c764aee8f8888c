"""No queue is a dict.

A dict keeps the gaps of removed items and steps over them each time its first item is looked up: a
queue made of one costs O(n) per step. OrderedDict and deque do not.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("kvd", "inference_svc", "shared")


def _modules() -> list[ast.Module]:
    """Yield the modules that have a dict as an attribute, or look up the first or last item."""
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    texts = (path.read_text(encoding="utf-8") for path in paths if "pb" not in path.parts)
    return [ast.parse(text) for text in texts if ": dict[" in text or "next(" in text]


def _plain_dicts(module: ast.Module) -> set[str]:
    """Return the names of attributes that are made as dicts."""
    return {
        node.target.attr
        for node in ast.walk(module)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Attribute)
        and ast.unparse(node.annotation).startswith("dict[")
    }


def _first_looks(call: ast.Call) -> ast.Attribute | None:
    """Return the x.y of next(iter(x.y)), next(reversed(x.y.values())) and the like."""
    match call:
        case ast.Call(
            func=ast.Name(id="next"),
            args=[ast.Call(func=ast.Name(id="iter" | "reversed"), args=[of]), *_],
        ):
            if isinstance(of, ast.Call) and isinstance(of.func, ast.Attribute):
                of = of.func.value  # .values(), .items(), .keys()
            return of if isinstance(of, ast.Attribute) else None
    return None


def _queues_of_dicts(modules: list[ast.Module]) -> list[str]:
    dicts = [_plain_dicts(module) for module in modules]
    of_others = set().union(*dicts)
    found = []
    for module, own in zip(modules, dicts, strict=True):
        calls = (node for node in ast.walk(module) if isinstance(node, ast.Call))
        for looked_at in filter(None, map(_first_looks, calls)):
            is_own = isinstance(looked_at.value, ast.Name) and looked_at.value.id == "self"
            if looked_at.attr in (own if is_own else of_others):
                found.append(ast.unparse(looked_at))
    return found


def test_no_dict_is_a_queue():
    """No dict that outlives a call is read at its first or last item."""
    assert _queues_of_dicts(_modules()) == []


@pytest.mark.parametrize(
    ("looks", "found"),
    [
        ("next(iter(self._queue))", ["self._queue"]),
        ("next(reversed(state._queue.values()))", ["state._queue"]),
        ("next(iter(self._queue.items()))", ["self._queue"]),
        ("next(iter(self._other))", []),
        ("self._queue.popitem()", []),
    ],
)
def test_the_check_finds_queues_made_of_dicts(looks, found):
    """The check above finds each form that it is meant to find."""
    made = "self._queue: dict[int, str] = {}\nself._other: OrderedDict[int, str] = OrderedDict()\n"
    assert _queues_of_dicts([ast.parse(made + looks)]) == found
