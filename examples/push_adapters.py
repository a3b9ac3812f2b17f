"""Upload the adapters that another server was started with.

    python examples/push_adapters.py --tenant acme sql=adapters/sql '{"name": "chat", "path": "adapters/chat"}'
    python examples/push_adapters.py --tenant acme "$LORA_ADAPTERS"
    python examples/push_adapters.py --tenant acme adapters/*/

An adapter is given as vLLM's `--lora-modules` has it (`NAME=DIR`, or a JSON object with `name` and `path`), as TGI's
`LORA_ADAPTERS` has it (the same, separated by commas), or as a directory, whose name it gets. Each is pushed by
`loraplex adapter push`, which reads LORAPLEX_ADMIN_URL and LORAPLEX_ADMIN_TOKEN. Characters that a name may not have
become `-`. The same bytes again make no second version, so the script may be run again after a failure.

The exit status is 1 if an adapter was not accepted; the others are uploaded all the same.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path


def adapters_of(words: Iterable[str]) -> dict[str, Path]:
    """Name here → directory.

    Raises:
        ValueError: a word is none of the three forms, names no directory, or has the name of another.
    """
    found: dict[str, Path] = {}
    for word in words:
        for theirs, folder in _pairs(word):
            if not folder.is_dir():
                raise ValueError(
                    f"{word}: {folder} is not a directory; fetch what is on a hub or in a bucket first"
                )
            name = re.sub(r"[^a-z0-9._-]", "-", theirs.lower()).lstrip("._-")[:63]
            if not name:
                raise ValueError(f"{word}: a name needs a letter or a digit")
            if name in found:
                raise ValueError(
                    f"{word}: two adapters would be called {name}; give one of them another name"
                )
            found[name] = folder
    return found


def _pairs(word: str) -> list[tuple[str, Path]]:
    """The other server's name, and the directory, of each adapter in one word."""
    if word.lstrip().startswith("{"):
        try:
            given = json.loads(word)
            return [(given["name"], Path(given["path"]))]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{word}: not a JSON object with a name and a path") from error
    pairs = []
    for part in filter(None, word.split(",")):
        name, equals, path = part.partition("=")
        folder = Path(path if equals else part)
        pairs.append((name if equals else folder.resolve().name, folder))
    return pairs


def push(tenant: str, name: str, folder: Path) -> bool:
    """Uploads one adapter and says what became of it."""
    command = ["loraplex", "adapter", "push", name, str(folder), "--tenant", tenant, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(f"{name}: {done.stderr.strip()}")
        return False
    version = json.loads(done.stdout)
    print(f"{name}: {version['version']}, rank {version['rank']}, {version['bytes'] / 1e6:.2f} MB")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description="Upload the adapters that another server was started with.")
    parser.add_argument("--tenant", required=True, help="whose they will be")
    parser.add_argument(
        "adapters", nargs="+", metavar="ADAPTER", help="NAME=DIR, JSON with name and path, or DIR"
    )
    given = parser.parse_args()
    try:
        adapters = adapters_of(given.adapters)
    except ValueError as error:
        parser.error(str(error))
    refused = [name for name, folder in adapters.items() if not push(given.tenant, name, folder)]
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
