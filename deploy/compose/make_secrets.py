"""`python3 deploy/compose/make_secrets.py [FOLDER]`: random passwords and keys for compose.yaml, one file each.

FOLDER is `secrets` beside this file. It gets the mode 0700. The files in it can be read by all, because a container's
user has another number than yours: no other user of the machine gets through the folder, and compose mounts single
files. Needs nothing but the standard library. Files that exist are left as they are.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

LORAPLEX = """\
# Settings of the server that are secret; the others are in compose.yaml.
database-url = "postgresql://loraplex:{postgres}@postgres:5432/loraplex"
redis-url = "redis://:{redis}@redis:6379/0"
admin-token = "{admin}"
key-pepper = "{pepper}"
"""
REDIS = """\
# As docs/redis.md wants it: nothing is evicted, and nothing is written to the disk.
requirepass {redis}
maxmemory 64mb
maxmemory-policy noeviction
save ""
appendonly no
"""


def make_files() -> Mapping[str, str]:
    """File names and contents. Values have no character that a URL or a configuration file would read otherwise."""
    postgres, redis, admin, grafana = (secrets.token_urlsafe(32) for _ in range(4))
    return {
        "loraplex.toml": LORAPLEX.format(
            postgres=postgres, redis=redis, admin=admin, pepper=secrets.token_hex(32)
        ),
        "postgres-password": postgres,
        "redis.conf": REDIS.format(redis=redis),
        "redis-password": redis,
        "grafana-password": grafana,
    }


def main(folder: Path) -> int:
    """The exit code. Files belong together, so either all are written or none is."""
    files = make_files()
    there = [name for name in files if (folder / name).exists()]
    if there:
        print(f"{folder} has {', '.join(there)} already: nothing was changed", file=sys.stderr)
        return 1
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    for name, content in files.items():
        path = folder / name
        path.write_text(content)
        path.chmod(0o644)
    print(f"secrets are in {folder}; loraplex.toml has the admin token")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("secrets")))
