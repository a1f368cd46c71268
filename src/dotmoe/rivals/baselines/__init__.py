"""Baselines: published methods that give an `ExpertLayout` and leave the weights as they are.

Each file describes its method and how ours differs; `contract.py` defines the interface, and
`methods.py` has all by name.
"""

from dotmoe.rivals.baselines.contract import SplitInputs as SplitInputs
from dotmoe.rivals.baselines.methods import METHODS as METHODS
from dotmoe.rivals.baselines.methods import Method as Method
from dotmoe.rivals.baselines.methods import active_share as active_share
from dotmoe.rivals.baselines.methods import baseline as baseline
from dotmoe.rivals.baselines.methods import granularity_of as granularity_of
from dotmoe.rivals.baselines.methods import routed_by_own as routed_by_own
from dotmoe.rivals.baselines.methods import state_of as state_of
from dotmoe.rivals.config import BaselineConfig as BaselineConfig
