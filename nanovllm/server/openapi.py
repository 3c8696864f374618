"""/openapi.json with the bodies in it, which the routes read by themselves."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from nanovllm.server.body import Body

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
STATUSES = {
    "400": "A field cannot be honoured; the error names it",
    "401": "No valid API key",
    "404": "No such model",
    "408": "Took too long",
    "413": "The body is too large",
    "415": "Not JSON",
    "429": "Too many wait; see Retry-After",
    "500": "Failed",
    "503": "The engine has failed",
}


def describe_bodies(app: FastAPI, bodies: dict[str, type[Body]]) -> None:
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        document = plain()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas["Error"] = ERROR
        error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        for path, operations in document["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("422", None)
                for status, text in STATUSES.items():
                    operation["responses"].setdefault(status, {"description": text, "content": error})
            if path in bodies:
                schema = bodies[path].model_json_schema(ref_template="#/components/schemas/{model}")
                schemas.update(schema.pop("$defs", {}))
                schemas[bodies[path].__name__] = schema
                reference = {"$ref": f"#/components/schemas/{bodies[path].__name__}"}
                content = {"application/json": {"schema": reference}}
                operations["post"]["requestBody"] = {"required": True, "content": content}
                answer: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
                if "stream" in bodies[path].model_fields:
                    answer["text/event-stream"] = {"schema": {"type": "string"}}
                operations["post"]["responses"]["200"]["content"] = answer
        return document

    app.openapi = openapi  # type: ignore[method-assign]
