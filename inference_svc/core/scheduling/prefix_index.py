"""A radix tree of token ids, to find KV in the engine's memory with the same prefix as a prompt.

A node stands for a prefix that several sequences share, or for a whole sequence; its edge holds the
tokens behind its parent's prefix. So a tree has at most two nodes for each sequence, however long
the sequences are. A look-up costs O(tokens that match).

Equal tokens have equal KV only within a scope (a tenant's salt, a model, a lineage). Each scope has
a tree of its own, so that sequences of other scopes are never found.

Invariants (`check`): 1. a node's keys are those of all sequences that begin with its prefix; 2. a
node with one child is the end of some sequence, unless it is the root; 3. no two children of a node
begin with the same token.

*Source:* RadixAttention: SGLang (NeurIPS'24).
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(eq=False)
class _Node(Generic[K]):
    """A prefix.

    Attributes:
        edge: its tokens behind the parent's prefix; empty only for the root.
        keys: keys of the sequences that begin with it; an ordered set.
        children: child nodes, by the first token of their edge.
    """

    edge: tuple[int, ...]
    keys: dict[K, None] = field(default_factory=dict)
    children: "dict[int, _Node[K]]" = field(default_factory=dict)


class PrefixIndex(Generic[K]):
    """Sequences of token ids by key, indexed by their prefixes within a scope."""

    def __init__(self) -> None:
        self._roots: dict[Hashable, _Node[K]] = {}  # by scope
        self._sequences: dict[K, tuple[Hashable, tuple[int, ...]]] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def put(self, key: K, scope: Hashable, token_ids: Sequence[int]) -> None:
        """Add the sequence of a key, which has none yet."""
        assert key not in self._sequences, f"{key} has a sequence"
        ids = tuple(token_ids)
        self._sequences[key] = scope, ids
        node = self._roots.setdefault(scope, _Node(()))
        node.keys[key] = None
        start = 0
        while start < len(ids):
            child = node.children.get(ids[start])
            if child is None:
                child = node.children[ids[start]] = _Node(ids[start:])
            else:
                num_common = common_prefix(child.edge, ids[start:])
                if num_common < len(child.edge):
                    child = self._split(node, child, num_common)
            child.keys[key] = None
            start += len(child.edge)
            node = child

    def take(self, key: K) -> None:
        """Remove a key's sequence."""
        scope, ids = self._sequences.pop(key)
        root = node = self._roots[scope]
        del root.keys[key]
        start = 0
        while start < len(ids):
            parent, node = node, node.children[ids[start]]
            del node.keys[key]
            if not node.keys:
                del parent.children[node.edge[0]]
                self._join(root, parent)
                break
            start += len(node.edge)
        else:
            self._join(root, node)
        if not root.keys:
            del self._roots[scope]

    def longest(
        self, scope: Hashable, token_ids: Sequence[int], is_usable: Callable[[K], bool]
    ) -> tuple[K, int] | None:
        """Find the sequence that has the longest common prefix with these tokens.

        Args:
            scope: the scope of the tokens.
            token_ids: the tokens to look up.
            is_usable: whether a key may be the result; among equals, the one that was added first
                is.

        Returns:
            Its key and the prefix's length; None: no usable sequence shares a token.
        """
        node, start = self._roots.get(scope), 0
        path: list[tuple[_Node[K], int]] = []  # nodes that match, with the length that does
        while node is not None and start < len(token_ids):
            child = node.children.get(token_ids[start])
            if child is None:
                break
            num_common = common_prefix(child.edge, token_ids[start : start + len(child.edge)])
            start += num_common
            path.append((child, start))
            node = child if num_common == len(child.edge) else None
        for node, length in reversed(path):
            key = next(filter(is_usable, node.keys), None)
            if key is not None:
                return key, length
        return None

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        found: dict[K, tuple[Hashable, tuple[int, ...]]] = {}
        for scope, root in self._roots.items():
            assert root.keys, "a scope without sequences is left"
            assert not root.edge
            self._check(scope, root, (), found)
        assert found == self._sequences

    def _check(
        self,
        scope: Hashable,
        node: _Node[K],
        prefix: tuple[int, ...],
        found: dict[K, tuple[Hashable, tuple[int, ...]]],
    ) -> None:
        deeper: dict[K, None] = {}
        for first, child in node.children.items():
            assert child.edge[0] == first
            assert not deeper.keys() & child.keys.keys()
            deeper |= child.keys
            self._check(scope, child, prefix + child.edge, found)
        assert deeper.keys() <= node.keys.keys()
        ends = node.keys.keys() - deeper.keys()
        assert not node.edge or ends or len(node.children) > 1, "a node that nothing needs"
        found |= dict.fromkeys(ends, (scope, prefix))

    def _split(self, parent: _Node[K], child: _Node[K], num_tokens: int) -> _Node[K]:
        """Insert a node above `child`, with the first tokens of its edge, and return it."""
        upper = _Node(child.edge[:num_tokens], dict(child.keys))
        parent.children[upper.edge[0]] = upper
        child.edge = child.edge[num_tokens:]
        upper.children[child.edge[0]] = child
        return upper

    def _join(self, root: _Node[K], node: _Node[K]) -> None:
        """Merge a node with its only child, unless a sequence ends or branches at the node."""
        if node is root or len(node.children) != 1:
            return
        (child,) = node.children.values()
        if len(child.keys) == len(node.keys):
            node.edge += child.edge
            node.children = child.children


def common_prefix(ours: Sequence[object], theirs: Sequence[object]) -> int:
    """Return the length of the longest common prefix."""
    shorter = min(len(ours), len(theirs))
    if tuple(ours[:shorter]) == tuple(theirs[:shorter]):  # the common case, at memcmp's speed
        return shorter
    return next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
