"""The Redis of the limits: its URL, whether it is fit for them, and the limiter on it. A server without one does not
import its library."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from loraplex.app.settings import Settings
from loraplex.control.background import BackgroundTasks
from loraplex.control.limits.in_process import InProcessLimiter
from loraplex.control.limits.limiter import Limiter

if TYPE_CHECKING:
    from loraplex.control.limits.redis_limiter import LimiterWatch


def make_limiter(settings: Settings, watch: LimiterWatch, background: BackgroundTasks) -> Limiter:
    """The limiter of the settings; it does not begin before its `start`. Raises SettingsInvalid."""
    if not settings.redis_url:
        return InProcessLimiter()
    from loraplex.app.storage.redis_fitness import check_url
    from loraplex.control.limits.redis_limiter import RedisLimiter
    from loraplex.control.limits.redis_link import RedisLink, redis_script

    check_url(settings.redis_url)
    link = RedisLink(settings.redis_url, redis_script())
    return RedisLimiter(link, watch, when_apart=settings.limits_when_apart, background=background)


def check_redis(settings: Settings) -> None:
    """Raises SettingsInvalid where it cannot be reached, or would forget limits by itself."""
    if settings.redis_url:
        from loraplex.app.storage.redis_fitness import examine_redis

        fitness = examine_redis(settings.redis_url)
        if fitness.warning:
            structlog.get_logger("loraplex").warning("limiter_redis_unfit", reason=fitness.warning)


def describe_redis(settings: Settings) -> str:
    """Doctor's report about the Redis. Raises SettingsInvalid."""
    if not settings.redis_url:
        return "none: each server counts its limits by itself"
    from loraplex.app.storage.redis_fitness import examine_redis

    fitness = examine_redis(settings.redis_url)
    return fitness.summary + (f"; but {fitness.warning}" if fitness.warning else "")
