"""The gateway: from requests to patches and token ids, and to a worker with them; without torch.

Reading order: `protocols.py` (what passes between the parts), `pipeline.py` (the parts in a row),
`fetch.py` with `addresses.py` and `data_url.py`, `pool.py` with `child.py`, `channel.py`,
`job_spec.py` and `jobs.py`, `decode_image.py`, `decode_video.py`, `sampling.py`, `sizing.py`,
`pixels.py`, `expand.py`, `families/`. Then `server/` (HTTP) and `wire/` (gRPC to the workers).

Needs Linux, Python 3.11 and the packages of the `examples` extra.
"""
