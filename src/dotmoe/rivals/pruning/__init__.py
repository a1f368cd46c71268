"""Published pruning methods: other ways to a cheaper model, compared with the conversions.

Each file describes its method and how ours differs; `contract.py` defines the interface, and
`methods.py` has all by name.
"""

from dotmoe.models.load import MODEL as MODEL
from dotmoe.rivals.pruning.contract import PruneInputs as PruneInputs
from dotmoe.rivals.pruning.methods import PRUNING as PRUNING
from dotmoe.rivals.pruning.methods import PRUNING_METRICS as PRUNING_METRICS
from dotmoe.rivals.pruning.methods import TENSORS as TENSORS
from dotmoe.rivals.pruning.methods import Method as Method
from dotmoe.rivals.pruning.methods import prune as prune
from dotmoe.rivals.pruning.methods import require_prunable as require_prunable
