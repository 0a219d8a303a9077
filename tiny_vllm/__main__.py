"""`python -m tiny_vllm` is the `tiny-vllm` command."""

from __future__ import annotations

import sys

from tiny_vllm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
