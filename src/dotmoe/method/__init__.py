"""The paper's method, and what goes beyond it.

In the order of the paper: granularity, layout, transport (the assignment), router, masked (the
FFN in training), calibrate (the start), objective and align (the training), sparse (the FFN as it
is served); then repair and finetuning.
"""
