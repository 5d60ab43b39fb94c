"""The cut: against every assignment there is, on small graphs; and what a policy says of it."""

from __future__ import annotations

import doctest
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mezzo.core import assignment
from mezzo.core.assignment import Assignment, Edge, Graph, Node, assign, lines_of
from mezzo.core.errors import UsageError
from mezzo.core.policy import Policy

TIMES = st.integers(0, 50).map(float)
ERRORS = st.one_of(st.just(0.0), st.integers(0, 50).map(float), st.floats(1e-9, 1e3))


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[Node], list[Edge]]:
    names = [f"m{i}" for i in range(draw(st.integers(1, 7)))]
    nodes = [
        Node(name, draw(TIMES), draw(TIMES), draw(ERRORS), draw(st.sampled_from(["", "", "", "overflows"])))
        for name in names
    ]
    pairs = st.tuples(st.sampled_from(names), st.sampled_from(names))
    edges = [Edge(a, b, draw(TIMES), draw(ERRORS)) for a, b in draw(st.lists(pairs, max_size=12))]
    return nodes, edges


def every(graph: Graph) -> list[Assignment]:
    free = [node.path for node in graph.nodes.values() if not node.stays]
    subsets = itertools.chain.from_iterable(itertools.combinations(free, k) for k in range(len(free) + 1))
    return [graph.evaluate(subset) for subset in subsets]


def cost(one: Assignment, price: float) -> float:
    return one.seconds + price * one.error


@settings(max_examples=120, deadline=None)
@given(graphs(), st.sampled_from([0.0, 1e-3, 0.1, 1.0, 7.0, 1e4]))
def test_a_cut_is_the_cheapest_of_all_assignments(parts: tuple[list[Node], list[Edge]], price: float) -> None:
    graph = Graph(*parts)
    found = graph.cheapest(price)
    least = min(cost(one, price) for one in every(graph))
    assert cost(found, price) <= least + 1e-9 * (1.0 + least)
    assert all(not graph.nodes[path].stays for path in found.lowered)


@settings(max_examples=120, deadline=None)
@given(graphs(), st.one_of(st.just(0.0), st.floats(0.0, 300.0)))
def test_the_budget_holds_and_little_is_given_away(
    parts: tuple[list[Node], list[Edge]], budget: float
) -> None:
    """Never over the budget; the best if the budget does not bind; else nothing on the hull is better."""
    graph = Graph(*parts)
    found = assign(*parts, budget=budget)
    assert found.error <= budget
    assert (found.seconds, found.error) == (
        graph.evaluate(found.lowered).seconds,
        graph.evaluate(found.lowered).error,
    )
    within = [one for one in every(graph) if one.error <= budget]
    best = min(within, key=lambda one: one.seconds)
    free = min(every(graph), key=lambda one: one.seconds)
    if graph.cheapest(0.0).error <= budget:
        assert found.seconds == pytest.approx(free.seconds)
    # No price exists at which an assignment within the budget would have been both cheaper and chosen.
    assert found.seconds <= graph.evaluate(()).seconds + 1e-9
    single = [graph.evaluate(found.lowered ^ {path}) for path in graph.nodes if not graph.nodes[path].stays]
    assert not [one for one in single if one.error <= budget and one.seconds < found.seconds]
    assert best.seconds <= found.seconds


def test_of_equals_the_one_that_lowers_most() -> None:
    nodes = [Node("a", 1.0, 1.0), Node("b", 0.0, 0.0), Node("c", 1.0, 1.0, stays="overflows")]
    assert assign(nodes, [Edge("a", "b")]).lowered == {"a", "b"}


def test_a_cast_that_costs_more_than_it_brings_is_not_made() -> None:
    """A small layer between two that must stay in FP32 stays with them."""
    nodes = [Node("a", 1.0, 0.5, stays="x"), Node("b", 1.0, 0.9), Node("c", 1.0, 0.5, stays="x")]
    assert assign(nodes, [Edge("a", "b", 0.06), Edge("b", "c", 0.06)]).lowered == set()
    assert assign(nodes, [Edge("a", "b", 0.04), Edge("b", "c", 0.04)]).lowered == {"b"}


def test_what_no_price_finds_is_found_one_by_one() -> None:
    """At any price that leaves out the large one, the small one is left out too: its error is dearer."""
    nodes = [Node("large", 11.0, 1.0, error=4.0), Node("small", 2.0, 1.0, error=1.0)]
    assert assign(nodes, budget=1.0).lowered == {"small"}


def test_rounding_a_tensor_is_charged_to_who_takes_it_lowered_from_fp32() -> None:
    graph = Graph([Node("a", 1.0, 1.0), Node("b", 1.0, 1.0)], [Edge("a", "b", 0.0, 5.0)])
    assert [graph.evaluate(low).error for low in ((), ("a",), ("b",), ("a", "b"))] == [0.0, 0.0, 5.0, 0.0]


def test_a_fragile_module_is_left_out_and_the_others_are_not() -> None:
    nodes = [Node(f"m{i}", 2.0, 1.0, error=1e-6) for i in range(30)] + [Node("fragile", 2.0, 1.0, error=1.0)]
    edges = [Edge(f"m{i}", f"m{i + 1}", 0.01, 1e-7) for i in range(29)]
    found = assign(nodes, edges, budget=1e-3)
    assert found.lowered == {f"m{i}" for i in range(30)}
    assert found.price > 0.0


@pytest.mark.parametrize(
    ("nodes", "edges", "budget", "told"),
    [
        ([Node("a", 1, 1), Node("a", 1, 1)], [], 1.0, "different paths"),
        ([Node("a", 1, 1)], [Edge("a", "b")], 1.0, "'b', which is no node"),
        ([Node("a", 1, 1, math.inf)], [], 1.0, "finite and not negative"),
        ([Node("a", -1, 1)], [], 1.0, "finite and not negative"),
        ([Node("a", 1, 1)], [], -1.0, "0 or more"),
        ([Node("a", 1, 1)], [], math.nan, "0 or more"),
    ],
)
def test_what_makes_no_sense_is_refused(
    nodes: list[Node], edges: list[Edge], budget: float, told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        assign(nodes, edges, budget=budget)


PATHS = ["a", "a.b", "a.b.c", "a.d", "e", "e.f"]


@given(st.lists(st.booleans(), min_size=6, max_size=6), st.booleans())
def test_lines_say_the_assignment(lowered: list[bool], base: bool) -> None:
    """Read back by a policy whose modules follow the nearest line around them."""
    wanted = dict(zip(PATHS, lowered))
    lines = lines_of(wanted, base)
    policy = Policy("fp32", modules={path: "bf16" if low else "fp32" for path, low in lines.items()})

    def read(path: str) -> bool:
        pieces = path.split(".")
        for length in range(len(pieces), 0, -1):
            fmt = policy.format_for_module(".".join(pieces[:length]))
            if fmt is not None:
                return fmt == "bf16"
        return base

    assert {path: read(path) for path in PATHS} == wanted


def test_the_examples_hold() -> None:
    assert doctest.testmod(assignment).failed == 0
