"""`loraplex` that waits for the limits' Redis as long as a busy machine needs: `python patient_serve.py serve …`."""

from __future__ import annotations

from loraplex.control.limits import redis_limiter, redis_link
from support.control.limit_watch import patient_script

redis_limiter.TIMEOUT_S = redis_limiter.PATIENCE_S = 60.0
redis_link.redis_script = patient_script

if __name__ == "__main__":
    from loraplex.app.cli import main

    main()
