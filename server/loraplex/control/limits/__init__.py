"""Limits: rates, concurrency and token budgets of tenants and keys.

`service.RequestLimits` charges a request from its beginning to its end. `plan.plan_request` says what it is charged.
`in_process.InProcessLimiter` decides within one server, `redis_limiter.RedisLimiter` for all servers together.
`budgets.Budgets` holds slices of token budgets.
"""
