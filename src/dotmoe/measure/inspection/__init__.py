"""Estimates of what a conversion would give and cost, from the config alone."""

from dotmoe.measure.inspection.estimates import chosen_in_time as chosen_in_time
from dotmoe.measure.inspection.estimates import inspect_model as inspect_model
from dotmoe.measure.inspection.estimates import plan_of as plan_of
from dotmoe.measure.inspection.estimates import stored_dtype as stored_dtype
