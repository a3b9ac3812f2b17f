"""The scheduler: which tokens are computed next. No torch, no clock, no I/O.

`scheduler.Scheduler` makes the plan of a step. `fair_queue.FairQueue` orders the tenants by weighted virtual token
counters. `adapter_scheduling.AdapterScheduler` decides which adapters are loaded. `step_budget.StepBudget` limits the
size of a step while memory is short.
"""
