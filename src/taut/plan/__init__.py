"""Memory and time of a run, predicted from its model's shapes and from measurements of its parts.

    prediction = memory.predict_steps(run, config, kernels, work)      bytes by part, of one rank
    measured = memory.measure(built, packed, is_first=...)             the same, measured on a real micro-batch

No weights are loaded. tracing.py traces a micro-batch, memory.py adds the effect of several ranks, rates.py predicts
seconds, workload.py makes the micro-batches. docs/plan.md has the equations and their errors against measurements.
"""
