"""A page that shows the OpenAPI document: plain HTML, made here, which needs no script and nothing from anywhere else."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, Final

_STYLE: Final = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color-scheme: light dark }
h2 { margin-top: 2.5rem } summary { cursor: pointer; padding: .3rem 0 } code { font-size: .95em }
.method { display: inline-block; min-width: 4rem; font-weight: 600 } table { border-collapse: collapse; margin: .5rem 0 1rem }
td, th { text-align: left; padding: .1rem .8rem .1rem 0; vertical-align: top } details { border-bottom: 1px solid #8884 }
"""


def make_page(document: Mapping[str, Any]) -> str:
    """The page, as one text."""
    by_tag: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            by_tag.setdefault(operation["tags"][0], []).append("".join(_operation(document, path, method, operation)))
    parts = "".join(f"<h2>{escape(tag)}</h2>{''.join(operations)}" for tag, operations in sorted(by_tag.items()))
    title, version, description = (escape(document["info"][name]) for name in ("title", "version", "description"))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title} {version}</h1>"
        f'<p>{description} The document: <a href="openapi.json">openapi.json</a>.</p>{parts}</body></html>'
    )


def _operation(document: Mapping[str, Any], path: str, method: str, operation: Mapping[str, Any]) -> Iterator[str]:
    name = f'<span class="method">{method.upper()}</span> <code>{escape(path)}</code> {escape(operation["summary"])}'
    yield f"<details><summary>{name}</summary>"
    if "requestBody" in operation:
        yield "<h4>Body</h4>"
        yield from _fields(document, operation["requestBody"]["content"]["application/json"]["schema"])
    for media_type, content in operation["responses"]["200"]["content"].items():
        yield f"<h4>Answer: <code>{escape(media_type)}</code></h4>"
        yield from _fields(document, content["schema"])
    yield "<h4>Errors</h4><table>"
    for status, response in operation["responses"].items():
        if status != "200":
            yield f"<tr><td>{status}</td><td>{escape(response['description'])}</td></tr>"
    yield "</table></details>"


def _fields(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[str]:
    resolved = _resolved(document, schema)
    if "properties" not in resolved:
        yield f"<p>{escape(_type(resolved))}</p>"
        return
    yield "<table>"
    for name, field in resolved["properties"].items():
        need = "required" if name in resolved.get("required", ()) else ""
        yield f"<tr><td><code>{escape(name)}</code></td><td>{escape(_type(field))}</td><td>{need}</td></tr>"
    yield "</table>"


def _resolved(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    if "$ref" in schema:
        found: Mapping[str, Any] = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return found
    return schema


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(map(str, schema["enum"]))
    if "const" in schema:
        return str(schema["const"])
    if schema.get("type") == "array" and "items" in schema:
        return f"list of {_type(schema['items'])}"
    return str(schema.get("type", "any"))
