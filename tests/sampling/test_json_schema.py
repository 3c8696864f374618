"""oneOf: a union whose branches differ in a property is written as anyOf; every text is then valid for the schema."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field, create_model

from nanovllm import LLM, RequestError, SamplingParams
from nanovllm.sampling.json_schema import without_unions

llguidance = pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog", "wolf"] = "dog"  # not required in the schema
    name: str = ""


class Leaf(BaseModel):
    kind: Literal["leaf"]


class Node(BaseModel):
    kind: Literal["node"]
    left: Leaf | Node = Field(discriminator="kind")


class Bird(BaseModel):
    family: Literal["bird"]


class Black(BaseModel):
    family: Literal["cat"]
    colour: Literal["black"]


class White(BaseModel):
    family: Literal["cat"]
    colour: Literal["white"]


def union(*kinds: Any, by: str = "kind") -> dict[str, Any]:
    pets: Any = kinds[0]
    for kind in kinds[1:]:
        pets = pets | kind
    return create_model("Owner", pet=(pets, Field(discriminator=by))).model_json_schema()


def accepts(schema: str, text: str) -> bool:
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_json_schema(schema), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.consume_tokens(list(text.encode()))) and matcher.is_accepting()


def is_valid(schema: Any, value: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


CATS_AND_DOGS = union(Cat, Dog)
TREE = Node.model_json_schema()
SMALL = {"kind": "node", "left": {"kind": "leaf"}}
NESTED = {
    "$defs": {cls.__name__: cls.model_json_schema() for cls in (Bird, Black, White)},
    "oneOf": [{"oneOf": [{"$ref": "#/$defs/Black"}, {"$ref": "#/$defs/White"}]}, {"$ref": "#/$defs/Bird"}],
}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            CATS_AND_DOGS,
            [{"pet": {"kind": "cat", "lives": 9}}, {"pet": {"kind": "wolf", "name": "x"}}],
            [{"pet": {"kind": "cat"}}, {"pet": {"kind": "cow"}}, {"pet": 5}, {"pet": {"kind": "dog", "name": 5}}],
        ),
        (
            TREE,
            [SMALL, {"kind": "node", "left": SMALL}],
            [{"kind": "node", "left": {"kind": "node"}}, {"kind": "node", "left": {"kind": "twig"}}],
        ),
        (NESTED, [{"family": "bird"}, {"family": "cat", "colour": "black"}], [{"family": "cat"}, {"family": "dog"}]),
        (
            {"oneOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"a": {"enum": [2, 3]}}}]},
            [{"a": 1}, {"a": 3}],
            [{"a": 4}],
        ),
    ],
    ids=["defaults", "recursive", "union of unions", "inline"],
)
def test_a_discriminated_union_can_be_written(schema: Any, good: list[Any], bad: list[Any]) -> None:
    made = without_unions(json.dumps(schema))
    for value in good:
        assert is_valid(schema, value)
        assert accepts(made, json.dumps(value))
    for value in bad:
        assert not is_valid(schema, value)
        assert not accepts(made, json.dumps(value))


def test_a_text_that_two_branches_match_is_not_written() -> None:
    """Without its kind a dog could be a wolf; such an object is no longer allowed, though each branch allows it."""
    wolf = create_model("Wolf", kind=(Literal["wolf"], "wolf"))
    dog = create_model("Dog", kind=(Literal["dog"], "dog"))
    schema = union(wolf, dog)
    assert not is_valid(schema, {"pet": {}})
    assert not accepts(without_unions(json.dumps(schema)), '{"pet": {}}')
    assert accepts(without_unions(json.dumps(schema)), '{"pet": {"kind": "dog"}}')


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"oneOf": []},
        {"oneOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"a": {"enum": [1, 2]}}}]},
        {"oneOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"b": {"const": 2}}}]},
        {"oneOf": [{"properties": {"a": {"const": 1}}}, {"$ref": "#/$defs/nowhere"}]},
        {"oneOf": [{"properties": {"a": {"const": 1}}}, {"$ref": "http://example.com/s"}]},
        {"oneOf": [{"$ref": "#"}, {"$ref": "#/oneOf/1"}]},
        {"oneOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"a": {"const": 2}}}], "anyOf": [{}]},
        {"oneOf": 5, "discriminator": {"propertyName": ["x"]}},
        {"oneOf": [5, None], "discriminator": {"propertyName": "x"}},
        {"const": {"oneOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"a": {"const": 2}}}]}},
        {"properties": {"oneOf": {"type": "integer"}}, "required": ["oneOf"]},
    ],
    ids=str,
)
def test_others_stay_as_they_are(schema: Any) -> None:
    assert json.loads(without_unions(json.dumps(schema))) == schema


def test_a_property_may_have_the_name_of_a_keyword() -> None:
    inner = {"oneOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"a": {"const": 2}}}]}
    made = json.loads(without_unions(json.dumps({"properties": {"const": inner, "enum": inner}})))
    assert "anyOf" in made["properties"]["const"]
    assert "anyOf" in made["properties"]["enum"]


LEAF = {"properties": {"kind": {"const": "leaf"}}}
DOUBLED = {f"u{i}": {"oneOf": [{"$ref": f"#/$defs/u{i + 1}"}] * 2} for i in range(24)}  # u0 is 2**24 leaves
CYCLE = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}


@pytest.mark.parametrize(
    "text",
    [
        '{"oneOf"',
        '{"items":' * 5000 + '{"oneOf": []}' + "}" * 5000,
        json.dumps({"$defs": {**DOUBLED, "u24": LEAF}, "$ref": "#/$defs/u0"}),
        json.dumps({"$defs": CYCLE, "oneOf": [{"$ref": "#/$defs/a"}, LEAF]}),
        json.dumps({"oneOf": [{"$ref": "#"}, LEAF]}),
    ],
    ids=["broken", "deep", "doubled", "cycle", "itself"],
)
def test_broken_and_endless_schemas_are_left_to_llguidance(text: str) -> None:
    assert without_unions(text) == text


def test_a_model_writes_one_of_them(llm: LLM) -> None:
    params = SamplingParams(structured_outputs={"json": CATS_AND_DOGS}, n=16, max_tokens=120, seed=8)
    [output] = llm.generate(["the rain"], params, use_tqdm=False)
    texts = [c.text for c in output.outputs if c.finish_reason == "stop"]
    assert texts
    assert all(is_valid(CATS_AND_DOGS, json.loads(text)) for text in texts)


def test_what_is_no_union_is_refused_by_name(llm: LLM) -> None:
    overlapping = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    with pytest.raises(RequestError, match=r"structured_outputs.*oneOf"):
        llm.generate("a", SamplingParams(structured_outputs={"json": overlapping}), use_tqdm=False)
