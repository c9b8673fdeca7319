# Writes the line format of jsonl.md. Call step() after each forward pass of the target, end() after each request.
import json


class Emitter:
    def __init__(self, path, engine, model, experts, k, moe_layers, **facts):
        self.file = open(path, "w", encoding="utf-8")
        shape = {"name": model, "experts": experts, "experts_per_token": k, "moe_layers": moe_layers}
        self.line(type="header", format="specprof.jsonl/1", engine=engine, model=shape, **facts)

    def line(self, **fields):
        self.file.write(json.dumps({k: v for k, v in fields.items() if v is not None}) + "\n")

    def step(self, request, tokens, routes, accepted=None, emitted=None, **more):
        """tokens: one a row; routes: [layers][rows][k] as nested lists (tensor.tolist()); accepted: of a verify step."""
        self.line(type="step", request_id=request, tokens=tokens, routes=routes, accepted=accepted, emitted=emitted, **more)

    def end(self, request, finish_reason="length"):
        self.line(type="request", request_id=request, finish_reason=finish_reason)
        self.file.flush()
