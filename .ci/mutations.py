"""Mutants of a file's functions: one change each, found and made in its syntax tree. Pure.

Comparisons, arithmetic, boolean operators, `not`, conditions, integers by one, truth values,
statements left out, and None returned instead: the opposite, where a function says whether
something holds, since nobody tells None from False. Not changed: assertions, which say what holds
anyway (as `strict` does), messages, what is logged, types, decorators and defaults.
"""

import ast
import copy
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
MARK = "‸"
SAYS_WHETHER = "says_whether"  # of a return in a function that returns a bool
LOGS = ("log.", "report(")  # what they say is nobody's promise


Path: TypeAlias = tuple[tuple[str, int], ...]  # fields and indices from the module to a node


class Mutant(NamedTuple):
    """One change of one function."""

    file: str
    function: str
    line: int
    statement: int  # its first line
    begin: int  # the function's first line
    change: str  # "before → after", as source
    place: str  # the line before and its own, marked where what is changed begins
    path: Path
    kind: int  # of the changes of that node, which

    @property
    def name(self) -> str:
        """As people look for it."""
        return f"{self.file}:{self.line} {self.function}: {self.change}"


def changed(node: ast.AST) -> Iterator[ast.AST]:
    """Every node that may stand in the place of this one."""
    new = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            new.ops = [COMPARISONS[type(op)]()]
            yield new
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in ARITHMETIC:
            new.op = ARITHMETIC[type(op)]()
            yield new
        case ast.BoolOp(op=op):
            new.op = ast.And() if isinstance(op, ast.Or) else ast.Or()
            yield new
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.If() | ast.While() | ast.IfExp():
            new.test = ast.UnaryOp(ast.Not(), new.test)
            yield new
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1)
        case ast.Return(value=ast.expr() as value) if _other(value, hasattr(node, SAYS_WHETHER)):
            new.value = _other(value, hasattr(node, SAYS_WHETHER))
            yield new
    if is_left_out(node):
        yield ast.Pass()


def _other(value: ast.expr, says_whether: bool) -> ast.expr | None:
    """Return what may be returned instead of a value, if it is not made by another change."""
    if not says_whether:
        return ast.Constant(None) if ast.unparse(value) != "None" else None
    match value:
        case ast.Constant() | ast.UnaryOp(op=ast.Not()) | ast.Compare(ops=[_]):
            return None
    return ast.UnaryOp(ast.Not(), value)


def is_left_out(node: ast.AST) -> bool:
    """Whether a function can do without this statement, and still be one."""
    match node:
        case ast.AugAssign() | ast.Raise() | ast.Expr(value=ast.Call() | ast.Await()):
            return True
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            return True
    return False


def mutants_of(file: str, source: str) -> Iterator[Mutant]:
    """All mutants of a file's functions."""
    statement, lines = 0, ["", *source.splitlines()]
    for node, path, function, begin in _nodes(_parsed(source), (), "", 0):
        if isinstance(node, ast.stmt):
            statement = node.lineno  # what follows is in it, up to the next one
        for kind, new in enumerate(changed(node)):
            change = f"{_line(node)} → {_line(new)}"
            own = _marked(lines[node.lineno], node.col_offset)
            place = f"{lines[node.lineno - 1].strip()}\n{own}"
            where = (file, function, node.lineno, statement, begin)
            yield Mutant(*where, change, place, path, kind)


def _parsed(source: str) -> ast.Module:
    """Return the tree, whose returns of a truth are marked."""
    tree = ast.parse(source)
    for function in ast.walk(tree):  # those around others come first
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            says_whether = isinstance(function.returns, ast.Name) and function.returns.id == "bool"
            for node in ast.walk(function):
                if not isinstance(node, ast.Return):
                    continue
                if says_whether:
                    setattr(node, SAYS_WHETHER, True)
                elif hasattr(node, SAYS_WHETHER):
                    delattr(node, SAYS_WHETHER)
    return tree


def _marked(line: str, num_bytes: int) -> str:
    """Mark where a node begins in its line: two changes of a function may read the same."""
    encoded = line.encode()
    return f"{encoded[:num_bytes].decode()}{MARK}{encoded[num_bytes:].decode()}".strip()


def _nodes(
    node: ast.AST, path: Path, function: str, begin: int
) -> Iterator[tuple[ast.AST, Path, str, int]]:
    """Walk over what functions do: nodes, where they are, and the function's name and first line.

    Args:
        node: from where on.
        path: to it.
        function: that it is in, or class.
        begin: that function's first line; 0 outside, since what an import runs is of no test.
    """
    if isinstance(node, ast.Assert | ast.JoinedStr):
        return
    if isinstance(node, ast.stmt) and ast.unparse(node).startswith(LOGS):
        return
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return  # as an assertion
    fields = [name for name in node._fields if name not in {"annotation", "returns"}]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        function, fields = f"{function}.{node.name}".lstrip("."), ["body"]
        begin = 0 if isinstance(node, ast.ClassDef) else node.lineno
    elif begin and hasattr(node, "lineno"):
        yield node, path, function, begin
    for field in fields:
        value = getattr(node, field, None)
        for index, child in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(child, ast.AST):
                yield from _nodes(child, (*path, (field, index)), function, begin)


def _line(node: ast.AST) -> str:
    return ast.unparse(ast.fix_missing_locations(node)).split("\n")[0]


def mutated(mutant: Mutant, source: str) -> ast.Module:
    """Return the tree of its module with the change made."""
    tree = _parsed(source)
    holder: ast.AST = tree
    for field, index in mutant.path[:-1]:
        value = getattr(holder, field)
        holder = value[index] if isinstance(value, list) else value
    field, index = mutant.path[-1]
    value = getattr(holder, field)
    node = value[index] if isinstance(value, list) else value
    new = ast.copy_location(list(changed(node))[mutant.kind], node)
    if isinstance(value, list):
        value[index] = new
    else:
        setattr(holder, field, new)
    return ast.fix_missing_locations(tree)
