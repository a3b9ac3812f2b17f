"""The database and the Redis that the settings name.

`database.upgrade_database` brings the schema up to date. `redis.make_limiter` makes the limiter on the Redis, or one
for this process alone. `redis_fitness.examine_redis` checks that a Redis can hold limits.
"""
