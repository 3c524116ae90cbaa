"""`python -m examples.m3_serving.gateway --model DIR --worker HOST:PORT --port 8000`."""

import sys

from .server.command import main

if __name__ == "__main__":
    sys.exit(main())
