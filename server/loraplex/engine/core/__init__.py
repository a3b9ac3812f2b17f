"""The engine core: requests in, steps of the runner, token events out. No torch.

`engine_core.EngineCore` drives a step. `in_flight.InFlightSteps` follows each step from submission to its result.
`request_tracker.RequestTracker` turns results into the requests' events. `admission.check_request` refuses requests
that can never be served. `stats.engine_stats` reports the counters of scheduler and adapter cache.
"""
