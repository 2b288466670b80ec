"""Strategy graphs: one choice per node, costs on nodes and edges, memory limits; solved with a proved bound.

Nothing here knows models or GPUs: a graph is NumPy arrays. See docs/backend.md.
"""

from milpplan.graph.pipeline import PipelineSplit, split_chain
from milpplan.graph.result import GraphProgress, GraphSolution, MemoryRow
from milpplan.graph.strategy_graph import Peak, StrategyGraph

__all__ = ["GraphProgress", "GraphSolution", "MemoryRow", "Peak", "PipelineSplit", "StrategyGraph", "split_chain"]
