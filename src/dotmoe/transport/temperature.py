"""Temperature of the transport plan as a pure function of the training step."""


def temperature(step: int, *, start: float, end: float, warmup_steps: int) -> float:
    """Temperature tau at a step: linear over the warm-up, then constant.

        tau(t) = start + (end - start) * min(t / warmup_steps, 1)

    The paper anneals from 1.0 to 0.1 over the warm-up of the learning rate and validates at `end`
    (app:log_domain_sinkhorn, paragraph Temperature Annealing).

    Args:
        step: Optimizer steps taken, 0 or more.
        start: Temperature at step 0, above 0, in units of affinity.
        end: Temperature from `warmup_steps` on, above 0.
        warmup_steps: Length of the ramp, 0 or more; 0 gives `end` at once.

    Returns:
        The temperature; exactly `end` from `warmup_steps` on.

    Raises:
        ValueError: A negative step or warm-up, or a temperature that is not positive.

    Example:
        >>> [temperature(t, start=1.0, end=0.5, warmup_steps=2) for t in range(4)]
        [1.0, 0.75, 0.5, 0.5]
    """
    if step < 0 or warmup_steps < 0:
        raise ValueError(f"step {step} and warmup_steps {warmup_steps} must not be negative.")
    if not (start > 0 and end > 0):
        raise ValueError(f"temperatures run from {start} to {end}, but both must be above 0.")
    if step >= warmup_steps:
        return end
    return start + (end - start) * (step / warmup_steps)
