"""The scheduler alone: requests of a trace against memories that are too small for them, with and without a host tier.

No model: the real scheduler and the real manager, a clock, and a cost for each step. All requests are submitted when the
trace says so, at a rate that keeps a queue. `sched.recomputed_over_best`: prompt tokens computed in all, over those of the
best order that was found offline, for the worst memory. `sched.max_wait_over_mean`: the longest time from submission to
the first step over the mean, for the worst memory.
"""
