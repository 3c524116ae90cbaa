"""The media gateway under load, without a model: `python -m bench.gateway --help`."""
