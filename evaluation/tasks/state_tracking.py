"""State tracking: where a depth-first search of a graph stands after some steps, a loop that a reader must run itself."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from transformers import PreTrainedTokenizerBase

from kvstitch.evaluation.options import check_choice, check_types
from kvstitch.evaluation.tasks.fields import field, typed_field
from kvstitch.evaluation.tasks.generated import GeneratedOrRead
from kvstitch.evaluation.tasks.records import Parts
from kvstitch.evaluation.tasks.sources import BadRecord, Record

ASKS = {
    "current_node": ("At which node does the search stand", "The search stands at node", "first_number"),
    "stack": ("Which nodes are on the stack, from the bottom up", "The stack holds the nodes", "number_list"),
    "visited_nodes": ("Which nodes were visited, in ascending order", "The visited nodes are", "number_list"),
}


class SearchState(NamedTuple):
    """A depth-first search after some steps."""

    stack: list[int]
    visited: list[int]


def depth_first(edges: Iterable[Sequence[int]], start: int) -> list[SearchState]:
    """States of the search, from the one before the first step to the last in which a node is on the stack.

    A step goes to the smallest neighbour that was not visited, or back by one node where there is none.
    """
    neighbours: dict[int, set[int]] = {start: set()}
    for first, second in edges:
        neighbours.setdefault(first, set()).add(second)
        neighbours.setdefault(second, set()).add(first)
    stack, visited = [start], {start}
    states = [SearchState([start], [start])]
    while True:
        ahead = sorted(neighbours[stack[-1]] - visited)
        if ahead:
            stack.append(ahead[0])
            visited.add(ahead[0])
        else:
            stack.pop()
        if not stack:
            return states
        states.append(SearchState(list(stack), sorted(visited)))


@dataclass(frozen=True, kw_only=True)
class StateTracking(GeneratedOrRead):
    """Connected graphs of drawn size, half of them trees and half with two edges a node.

    Args:
        ask: "current_node", "stack" or "visited_nodes".
        min_nodes: of a generated graph.
        max_nodes: of a generated graph.
        min_steps: of the search.
        max_steps: of the search, or as many as it has.
        path: a JSON Lines file with `graph`, `start_node`, `steps` and `answer`, read instead.
        max_new_tokens: `None`: 48 for a node; for a list of nodes room for all `max_nodes` of them, digit by digit with comma
            and blank (4 tokens each up to 100 nodes). A file of larger graphs needs `max_nodes` to say so.
    """

    ask: str = "current_node"
    min_nodes: int = 10
    max_nodes: int = 30
    min_steps: int = 5
    max_steps: int = 30
    grader: str | None = None
    max_new_tokens: int | None = None
    prefill_tokens: int | None = None

    sizes: ClassVar[tuple[str, ...]] = ("max_nodes",)

    def __post_init__(self):
        check_types(self, "task")
        check_choice("task.ask", self.ask, ASKS)
        for least, low, high in ((5, "min_nodes", "max_nodes"), (1, "min_steps", "max_steps")):
            if not least <= getattr(self, low) <= getattr(self, high):
                raise ValueError(
                    f"task.{low} must be in [{least}, task.{high}={getattr(self, high)}], got {getattr(self, low)}"
                )
        object.__setattr__(self, "grader", self.grader or ASKS[self.ask][2])
        if self.max_new_tokens is None:
            room = (len(str(self.max_nodes - 1)) + 2) * self.max_nodes
            object.__setattr__(self, "max_new_tokens", 48 if self.ask == "current_node" else room)
        super().__post_init__()

    def make(self, rng: random.Random, index: int, tokenizer: PreTrainedTokenizerBase) -> Record:
        """See `Generated.make`."""
        nodes = rng.randint(self.min_nodes, self.max_nodes)
        order = rng.sample(range(nodes), nodes)
        edges = {_edge(order[place], order[rng.randrange(place)]) for place in range(1, nodes)}
        wanted = nodes - 1 if rng.random() < 0.5 else min(2 * nodes, nodes * (nodes - 1) // 2)
        while len(edges) < wanted:
            edges.add(_edge(*rng.sample(range(nodes), 2)))
        states = depth_first(sorted(edges), 0)
        steps = rng.randint(self.min_steps, self.max_steps)
        steps = min(steps, len(states) - 1)
        answer = {
            "current_node": states[steps].stack[-1],
            "stack": states[steps].stack,
            "visited_nodes": states[steps].visited,
        }
        graph = {"nodes": list(range(nodes)), "edges": [list(edge) for edge in sorted(edges)]}
        return {"graph": graph, "start_node": 0, "steps": steps, "answer": answer}

    def parts(self, record: Record, where: str) -> Parts:
        """See `Records.parts`."""
        graph = typed_field(record, "graph", dict, "an object", where)
        edges = typed_field(graph, "edges", list, "a list of pairs of nodes", where)
        if not all(
            isinstance(edge, list) and len(edge) == 2 and all(isinstance(node, int) for node in edge) for edge in edges
        ):
            raise BadRecord(f"{where}: 'edges' must hold pairs of nodes")
        start, steps = (typed_field(record, name, int, "a whole number", where) for name in ("start_node", "steps"))
        states = depth_first(edges, start)
        if not 0 <= steps < len(states):
            raise BadRecord(f"{where}: the search has {len(states) - 1} steps, 'steps' is {steps}")
        wanted = field(typed_field(record, "answer", dict, "an object", where), self.ask, where)
        found = {
            "current_node": states[steps].stack[-1],
            "stack": states[steps].stack,
            "visited_nodes": states[steps].visited,
        }
        if wanted != found[self.ask]:
            raise BadRecord(f"{where}: after {steps} steps {self.ask} is {found[self.ask]}, the record says {wanted}")
        gold = str(wanted) if isinstance(wanted, int) else ", ".join(map(str, wanted))
        question, cue, _ = ASKS[self.ask]
        context = (
            "A graph has these edges, each between two nodes:\n"
            + ", ".join(f"{first}-{second}" for first, second in edges)
            + f"\n\nA depth-first search begins at node {start}, which is visited and on the stack. Each step goes to the "
            "smallest neighbour of the current node that was not visited yet and puts it on the stack; where there is none, "
            "it takes the current node off the stack and goes back to the one below.\n"
        )
        asked = f"\nQuestion: {question} after {steps} steps?\nAnswer: {cue}"
        meta = {"steps": steps, "edges": len(edges)}
        return self.asked(context, asked, (gold,), meta)


def _edge(first: int, second: int) -> tuple[int, int]:
    return (first, second) if first < second else (second, first)
