"""The way between gateway and worker: a gRPC service of our own, and memory that both see.

Reading order: `worker.proto` (the messages), `methods.py` (names and sizes), `shared_memory.py`,
`messages.py` (a request as messages), `client.py` (several workers behind one interface). The other
side is `worker/` beside the gateway. Nothing here imports torch.
"""
