"""Balanced transport of neurons to experts: pure functions of tensors, torch only.

`balanced_plan` and `sinkhorn` solve the same problem (eq:entropic_ot); `greedy_assignment` rounds
a plan to one expert per neuron.
"""

from dotmoe.method.transport.newton import balanced_plan
from dotmoe.method.transport.plan import Capacity, TransportPlan, greedy_assignment, sinkhorn

__all__ = ["Capacity", "TransportPlan", "balanced_plan", "greedy_assignment", "sinkhorn"]
