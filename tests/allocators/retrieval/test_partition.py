"""Leiden and what the ablation puts in its place: deterministic everywhere, sizes as asked, small ones pooled by rule."""

import inspect
import os
import subprocess
import sys

import numpy as np
import pytest
from scipy.sparse import block_diag, csr_matrix

from kvstitch.allocators.retrieval.graph import EdgeArrays
from kvstitch.allocators.retrieval.partition import (
    capped,
    chunks,
    components,
    leiden,
    leiden_of_size,
    median_size_seen,
    neighbourhoods,
    numbered,
    shuffled,
)
from kvstitch.allocators.retrieval.partitioning import Partitioning


def ring_of_cliques(cliques=6, size=5, isolated=0):
    blocks = [np.ones((size, size)) - np.eye(size) for _ in range(cliques)]
    blocks += [np.zeros((1, 1))] * isolated
    graph = block_diag(blocks).tolil()
    for clique in range(cliques):
        i, j = clique * size, ((clique + 1) % cliques) * size + 1
        graph[i, j] = graph[j, i] = 0.1
    graph = graph.tocsr()
    graph.sort_indices()
    return graph


def random_graph(nodes=400, edges=2500, seed=0):
    draw = np.random.default_rng(seed)
    i, j = draw.integers(0, nodes, (2, edges))
    graph = csr_matrix((draw.random(edges), (i, j)), shape=(nodes, nodes))
    graph = graph + graph.T
    graph.setdiag(0)
    graph.eliminate_zeros()
    graph.sort_indices()
    return graph


def modularity(graph, labels, resolution):
    degrees, total, quality = np.asarray(graph.sum(1)).ravel(), graph.sum(), 0.0
    for i in range(len(labels)):
        for j in range(len(labels)):
            if labels[i] == labels[j]:
                quality += graph[i, j] - resolution * degrees[i] * degrees[j] / total
    return quality / total


def test_leiden_finds_the_cliques():
    found = leiden(ring_of_cliques(isolated=3), 1.0, seed=1)
    assert found.labels.tolist() == [i // 5 for i in range(30)] + [6, 7, 8]
    assert found.modularity == pytest.approx(modularity(ring_of_cliques(), found.labels[:30], 1.0), abs=1e-6)


def test_a_finer_resolution_gives_smaller_communities():
    counts = [leiden(random_graph(), gamma, seed=0).labels.max() for gamma in (0.5, 4.0, 40.0)]
    assert counts[0] < counts[1] < counts[2]


def test_same_labels_in_every_process():
    source = "import numpy as np\nfrom scipy.sparse import csr_matrix\n" + inspect.getsource(random_graph)
    source += "from kvstitch.allocators.retrieval.partition import leiden\n"
    source += "print(leiden(random_graph(), 3.0, seed=5).labels.tolist())\n"
    outputs = set()
    for hash_seed in ("0", "1", "4711"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", source], env=environment, capture_output=True, text=True, check=True
        )
        outputs.add(done.stdout.strip())
    assert outputs == {str(leiden(random_graph(), 3.0, seed=5).labels.tolist())}


@pytest.mark.parametrize("target", [6, 15, 40])
def test_resolution_for_a_size(target):
    graph = random_graph(nodes=1200, edges=9000)
    found = leiden_of_size(graph, target, seed=0)
    seen = median_size_seen(found.labels, np.diff(graph.indptr) > 0)
    assert target / 1.8 < seen < target * 1.8 and found.resolution > 0


def test_a_graph_without_edges():
    empty = csr_matrix((5, 5))
    assert leiden(empty, 1.0, 0).labels.tolist() == [0, 1, 2, 3, 4]
    assert leiden_of_size(empty, 10, 0).labels.tolist() == [0, 1, 2, 3, 4]


def test_numbers_follow_the_first_member():
    assert numbered(np.array([7, 3, 7, 9, 3])).tolist() == [0, 1, 0, 2, 1]
    assert numbered(np.array([], dtype=np.int64)).tolist() == []


def test_pooling_by_hand():
    labels = np.array([0, 1, 1, 2, 3, 3, 3, 4, 5, 6])
    degrees = np.array([0, 1, 1, 0, 1, 1, 1, 5, 0.1, 2])
    # Tokens 0 and 3 have no edges and are pooled in any case.
    assert capped(labels, degrees, 10, 2).tolist() == [0, 1, 1, 0, 2, 2, 2, 3, 4, 5]
    # The smallest community goes next, single tokens with edges last: of them the one of least degree.
    assert capped(labels, degrees, 5, 4).tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 3, 4]
    assert capped(labels, degrees, 4, 4).tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 1, 3]
    # At most so many, but not fewer than runs of two can be.
    assert capped(labels, degrees, 1, 2).max() == 4
    assert capped(labels[1:3], degrees[1:3], 1, 2).tolist() == [0, 0]


def test_pooling_leaves_few_communities_alone():
    labels, degrees = np.array([0, 0, 1, 2]), np.ones(4)
    assert capped(labels, degrees, 3, 16) is labels


@pytest.mark.parametrize("seed", range(4))
def test_pooling_keeps_to_the_cap(seed):
    draw = np.random.default_rng(seed)
    labels = numbered(draw.integers(0, 60, 200) ** 2 // 40)
    degrees = draw.random(200) * (draw.random(200) < 0.8)
    for most in (13, 20, 40):
        assert capped(labels, degrees, most, 16).max() + 1 <= most


def test_components_and_neighbourhoods():
    graph = block_diag([np.ones((3, 3)) - np.eye(3), np.ones((2, 2)) - np.eye(2)]).tocsr()
    assert components(graph).tolist() == [0, 0, 0, 1, 1]
    star = csr_matrix(np.array([[0, 1, 1, 0.2], [1, 0, 0, 0], [1, 0, 0, 0], [0.2, 0, 0, 0]]))
    assert neighbourhoods(star, 1).tolist() == [0, 0, 0, 0]
    # Nodes 1 and 4 are the hubs; 3 has its heavier edge to 4, 5 has none to either and joins the hub before it.
    edges = {(0, 1): 1, (1, 2): 1, (1, 3): 0.4, (3, 4): 0.5, (4, 6): 2, (0, 5): 0.1}
    links = csr_matrix((list(edges.values()), tuple(zip(*edges))), shape=(7, 7))
    assert neighbourhoods((links + links.T).tocsr(), 2).tolist() == [0, 0, 0, 1, 1, 1, 1]


def test_chunks_and_shuffled_sizes():
    assert chunks(7, 3).tolist() == [0, 0, 0, 1, 1, 2, 2]
    labels = numbered(np.random.default_rng(0).integers(0, 5, 50))
    other = shuffled(labels, 1)
    assert sorted(np.bincount(other)) == sorted(np.bincount(labels)) and (other != labels).any()


def make(**options):
    settings = dict(
        direct_weight=0.5, partition="leiden", resolution=1.0, target_tokens=5, min_mean_tokens=1, run_tokens=4, iterations=1,
        seed=0, levels=1,
    )  # fmt: skip
    return Partitioning(**(settings | options))


def clique_edges(cliques=4, size=5):
    """Every token attends to the earlier ones of its clique."""
    pairs = [(c * size + i, c * size + j) for c in range(cliques) for i in range(size) for j in range(i)]
    query, key = (np.array(x) for x in zip(*pairs))
    return EdgeArrays(query, key, np.full(len(query), 0.3), np.ones(len(query)), np.arange(cliques * size))


@pytest.mark.parametrize("partition", ["leiden", "connected_components"])
def test_partitioning_keeps_to_its_nodes(partition):
    nodes = np.ones(22, bool)
    nodes[[0, 7]] = False
    found = make(partition=partition)(clique_edges(), nodes)
    assert (found.labels[[0, 7]] == -1).all() and found.degrees[0] == 0
    groups = [set(found.labels[[i for i in range(c * 5, c * 5 + 5) if nodes[i]]]) for c in range(4)]
    assert all(len(group) == 1 for group in groups) and len(set.union(*groups)) == 4
    # The tokens without edges at the end are a run.
    assert found.labels[20] == found.labels[21]


@pytest.mark.parametrize("partition", ["top_k_neighbourhoods", "chunks", "random"])
def test_the_ablation_has_as_many_regions(partition):
    nodes = np.ones(20, bool)
    like, other = make()(clique_edges(), nodes), make(partition=partition)(clique_edges(), nodes)
    assert other.num_regions == like.num_regions == 4


def test_no_nodes_at_all():
    found = make()(clique_edges(1), np.zeros(5, bool))
    assert (found.labels == -1).all() and found.num_regions == 0


def test_levels_are_made_of_whole_regions():
    graph_edges = clique_edges(cliques=40, size=4)
    found = make(levels=3)(graph_edges, np.ones(160, bool))
    labels = [found.labels, *found.coarse]
    assert len(labels) == 3
    for fine, coarse in zip(labels, labels[1:]):
        assert all(len(set(coarse[fine == region])) == 1 for region in set(fine))
        assert len(set(coarse)) < len(set(fine))


def test_as_many_levels_as_are_needed():
    """All graphs have as many, so that those of a batch go together; at the top stands one root."""
    many = make(levels="auto")(clique_edges(cliques=90, size=3), np.ones(270, bool))
    few = make(levels="auto")(clique_edges(), np.ones(20, bool))
    none = make(levels="auto")(clique_edges(1), np.zeros(5, bool))
    assert len(many.coarse) == len(few.coarse) == len(none.coarse)
    sizes = [int(level.max()) + 1 for level in (many.labels, *many.coarse)]
    assert sizes[0] == 90 and 1 < sizes[1] <= 16 and set(sizes[2:]) == {1}
    assert all((level == 0).all() for level in few.coarse) and all((level == -1).all() for level in none.coarse)
    for fine, coarse in zip((many.labels, *many.coarse), many.coarse):
        assert all(len(set(coarse[fine == region])) == 1 for region in set(fine))
