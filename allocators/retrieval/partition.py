"""Partitions of one graph into regions: Leiden's communities, and what the ablation puts in their place."""

from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components

PARTITIONS = ("leiden", "connected_components", "top_k_neighbourhoods", "kmeans", "chunks", "random")
# Size seen by a token against resolution, both on a log scale, has this slope over 512 to 8192 tokens of prose and code.
_SIZE_EXPONENT = -0.65
# A resolution of tokens / 128 gave regions of about this many tokens on the same texts.
_TYPICAL_TOKENS, _TOKENS_PER_RESOLUTION = 17, 128
_SIZE_TOLERANCE = 1.5
_FLATTEST = -0.3


@dataclass(frozen=True)
class Communities:
    """Leiden's partition of one graph.

    Args:
        labels: `[n]` int64 from 0.
        resolution: gamma that was used.
        modularity: of this partition at that resolution; it says nothing without gamma and n.
    """

    labels: np.ndarray
    resolution: float | int
    modularity: float | int


def leiden(graph: csr_matrix, resolution: float | int, seed: int, iterations: int = 1) -> Communities:
    """Communities of large modularity (Traag et al. 2019), from graspologic's own Rust code, which releases the GIL.

    Args:
        graph: symmetric, sorted indices, no self-loops. Nodes without edges become communities of their own.
        resolution: gamma, above 0; larger is finer.
        seed: same seed, same graph: same labels, in every process.
        iterations: full Leiden cycles.
    """
    nodes = graph.shape[0]
    labels = np.arange(nodes)
    if graph.nnz == 0:
        return Communities(labels, resolution, 0.0)
    # Here and not above: presses work, and kernels are timed, where there is no Leiden.
    from graspologic_native import leiden_csr

    modularity, found = leiden_csr(
        graph.indptr.astype(np.int64),
        graph.indices.astype(np.int32),
        graph.data.astype(np.float64),
        nodes,
        resolution=float(resolution),
        seed=seed,
        iterations=iterations,
    )
    members = np.fromiter(found.keys(), np.int64, len(found))
    # Nodes that are not in the answer keep a label of their own above all others.
    labels += nodes
    labels[members] = np.fromiter(found.values(), np.int64, len(found))
    return Communities(numbered(labels), resolution, float(modularity))


def leiden_of_size(
    graph: csr_matrix, target_tokens: float | int, seed: int, iterations: int = 1, attempts: int = 3
) -> Communities:
    """Communities of a resolution at which the median token sees about `target_tokens` in its own.

    Starts from what the number of tokens suggests and corrects by the usual slope, then by the slope between the last
    two runs, until the size is within a factor of 1.5 or `attempts` runs are spent.
    """
    linked = np.diff(graph.indptr) > 0
    resolution = max(int(linked.sum()), 1) / _TOKENS_PER_RESOLUTION
    resolution *= (target_tokens / _TYPICAL_TOKENS) ** (1 / _SIZE_EXPONENT)
    best, best_error = None, np.inf
    last: tuple[float, float] | None = None
    for _ in range(attempts):
        found = leiden(graph, resolution, seed, iterations)
        seen = median_size_seen(found.labels, linked)
        error = abs(np.log(seen / target_tokens))
        if error < best_error:
            best, best_error = found, error
        if error <= np.log(_SIZE_TOLERANCE):
            break
        exponent = _SIZE_EXPONENT if last is None else _exponent(last, (resolution, seen))
        last = resolution, seen
        resolution *= (target_tokens / seen) ** (1 / exponent)
    return best


def _exponent(first: tuple[float, float], second: tuple[float, float]) -> float:
    """Slope of size seen against resolution on log scales between two runs; the usual one where they do not tell."""
    slope = np.log(second[1] / first[1]) / np.log(second[0] / first[0])
    # Flatter than this the next step would leave the range in which the slope was seen.
    return min(slope, _FLATTEST) if slope < 0 else _SIZE_EXPONENT


def median_size_seen(labels: np.ndarray, counted: np.ndarray) -> float:
    """Median over the counted nodes of the size of their own community; 1 if none counts."""
    if not counted.any():
        return 1.0
    sizes = np.bincount(labels[counted])
    return float(np.median(sizes[labels[counted]]))


def numbered(labels: np.ndarray) -> np.ndarray:
    """The same partition with labels from 0, in the order of each community's first member."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    return rank[inverse]


def capped(labels: np.ndarray, degrees: np.ndarray, most: int, run_tokens: int) -> np.ndarray:
    """At most about `most` communities: the smallest, of equal ones those of least degree, are pooled.

    What is pooled is cut, in the order of positions, into runs of `run_tokens`. Nodes without edges are pooled in any
    case: nobody attended to them, so nothing is known of them but where they stand. Single nodes with edges are mostly
    tokens that many attend to; they are pooled last.
    """
    sizes = np.bincount(labels)
    weights = np.bincount(labels, degrees)
    linked = weights > 0
    order = np.lexsort((weights, sizes, linked & (sizes == 1), linked))
    pooled_tokens = np.cumsum(sizes[order])
    remaining = len(sizes) - 1 - np.arange(len(sizes)) + -(-pooled_tokens // run_tokens)
    num_pooled = int((~linked).sum())
    if num_pooled == 0 and len(sizes) <= most:
        return labels
    if len(sizes) - num_pooled + -(-int(sizes[order][:num_pooled].sum()) // run_tokens) > most:
        enough = np.flatnonzero(remaining <= most)
        num_pooled = max(num_pooled, int(enough[0]) + 1 if len(enough) else len(sizes))
    pooled = np.isin(labels, order[:num_pooled])
    labels = labels.copy()
    labels[pooled] = len(sizes) + np.arange(int(pooled.sum())) // run_tokens
    return numbered(labels)


def components(graph: csr_matrix) -> np.ndarray:
    """Connected components."""
    return numbered(connected_components(graph, directed=False)[1].astype(np.int64))


def neighbourhoods(graph: csr_matrix, count: int) -> np.ndarray:
    """The `count` nodes of largest weighted degree each gather the nodes whose heaviest edge to any of them is theirs.

    Nodes without such an edge join the gathering node that precedes them.
    """
    nodes = graph.shape[0]
    degrees = np.asarray(graph.sum(axis=1)).ravel()
    hubs = np.sort(np.argsort(-degrees, kind="stable")[: max(1, min(count, nodes))])
    links = graph[:, hubs].tocsr()
    labels = np.clip(np.searchsorted(hubs, np.arange(nodes), side="right") - 1, 0, len(hubs) - 1)
    linked = np.diff(links.indptr) > 0
    labels[linked] = np.asarray(links.argmax(axis=1)).ravel()[linked]
    labels[hubs] = np.arange(len(hubs))
    return numbered(labels)


def chunks(nodes: int, count: int) -> np.ndarray:
    """`count` runs of neighbours of equal length."""
    return np.arange(nodes) * min(count, nodes) // max(nodes, 1)


def shuffled(labels: np.ndarray, seed: int) -> np.ndarray:
    """Communities of the same sizes with random members."""
    return numbered(np.random.default_rng(seed).permutation(labels))
