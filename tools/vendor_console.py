"""Copies the console's libraries from the packages of tests/clients/package-console.json, and records their digests.

    make .clients/console/.installed && python tools/vendor_console.py

Beside each module is a declaration for TypeScript that names its package. An import of another package becomes one of
its file here, and the reference to a source map is left out: nothing else is changed. So the console needs no build
step and no import map.
"""

from __future__ import annotations

import json
import re
import sys
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ROOT / ".clients/console/node_modules"
VENDOR = ROOT / "admin/loraplex/admin/console/static/vendor"
DIGESTS = "digests.json"
FILES = {
    "preact.js": ("preact", "dist/preact.mjs"),
    "hooks.js": ("preact", "hooks/dist/hooks.mjs"),
    "signals-core.js": ("@preact/signals-core", "dist/signals-core.module.js"),
    "signals.js": ("@preact/signals", "dist/signals.module.js"),
    "htm.js": ("htm", "dist/htm.module.js"),
    "uplot.js": ("uplot", "dist/uPlot.esm.js"),
    "uplot.css": ("uplot", "dist/uPlot.min.css"),
}
"""The file here, its package, and its file there."""
DECLARATIONS = {
    "preact.d.ts": 'export * from "preact";\n',
    "hooks.d.ts": 'export * from "preact/hooks";\n',
    "signals-core.d.ts": 'export * from "@preact/signals-core";\n',
    "signals.d.ts": 'export * from "@preact/signals";\n',
    "htm.d.ts": 'export { default } from "htm";\n',
    "uplot.d.ts": 'export { default } from "uplot";\n',
}
"""Not served: a console needs none."""
IMPORTS = {
    "preact": "./preact.js",
    "preact/hooks": "./hooks.js",
    "@preact/signals-core": "./signals-core.js",
}


def vendored(packages: Path) -> dict[str, bytes]:
    """The files of `VENDOR` by name, made from these packages."""
    made = {
        name: _rewritten((packages / package / file).read_text()) for name, (package, file) in FILES.items()
    }
    about = []
    for package in dict.fromkeys(package for package, _ in FILES.values()):
        described = json.loads((packages / package / "package.json").read_text())
        licence = f"LICENSE-{package.rpartition('/')[2]}.txt"
        made[licence] = (packages / package / "LICENSE").read_bytes()
        files = {name: sha256(made[name]).hexdigest() for name, (of, _) in FILES.items() if of == package}
        about.append(
            {
                "package": package,
                "version": described["version"],
                "license": described["license"],
                "files": files | {licence: sha256(made[licence]).hexdigest()},
            }
        )
    made |= {name: text.encode() for name, text in DECLARATIONS.items()}
    made[DIGESTS] = (json.dumps(about, indent=2) + "\n").encode()
    return made


def _rewritten(text: str) -> bytes:
    text = re.sub(r"\n?(//# sourceMappingURL=.*|/\*# sourceMappingURL=.*\*/)\n?", "\n", text)
    for name, file in IMPORTS.items():
        text = re.sub(rf'(from\s*|import\s*)"{re.escape(name)}"', rf'\1"{file}"', text)
    return text.encode()


def main() -> int:
    VENDOR.mkdir(parents=True, exist_ok=True)
    for name, content in vendored(PACKAGES).items():
        (VENDOR / name).write_bytes(content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
