"""N:M sparse attention (Dfss, paper 003), as one operation and as single steps.

`saccade.nm_sparse_attention` is the whole operation. This package adds tools for studying it: pruned scores as a compressed
matrix (`scores`, `compress`, `NMWeights`), and two contexts. `recompute_selection` replaces the stored selection by a second forward.
`unordered_gradients` makes backward faster, but not bitwise reproducible.
"""

from saccade.nm_sparse.bits import recompute_selection
from saccade.nm_sparse.order import unordered_gradients
from saccade.nm_sparse.weights import NMWeights, compress, scores

__all__ = ["NMWeights", "compress", "recompute_selection", "scores", "unordered_gradients"]
