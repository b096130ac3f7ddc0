import assert from "node:assert/strict";
import { test } from "node:test";

import { toElements } from "../src/assets/elements.js";
import { freeLabels, overlaps } from "../src/assets/labels.js";
import { layout } from "../src/assets/layout.js";
import { readGraph } from "../src/assets/model.js";
import { many, three } from "../fixtures.mjs";

const sides = ({ x, y, width, height }) => ({
  left: x - width / 2,
  right: x + width / 2,
  top: y - height / 2,
  bottom: y + height / 2,
});

for (const [name, json] of [["three networks", three()], ["300 networks", many()]]) {
  test(`no two tiles overlap: ${name}`, () => {
    const tiles = [...layout(readGraph(json), 1.5).places].filter(([, place]) => !place.isBox);
    tiles.forEach(([one, first], index) => {
      for (const [other, second] of tiles.slice(index + 1)) {
        assert.ok(!overlaps(first, second), `${one} is on ${other}`);
      }
    });
  });

  test(`every node has a place: ${name}`, () => {
    const graph = readGraph(json);
    assert.deepEqual(new Set(layout(graph, 1.5).places.keys()), new Set(graph.nodes.keys()));
  });
}

test("a pod stands in its network, and a network in its VPC", () => {
  const { places } = layout(readGraph(three()), 1.5);
  const holds = (outer, inner) => {
    const [a, b] = [sides(places.get(outer)), sides(places.get(inner))];
    return a.left < b.left && b.right < a.right && a.top < b.top && b.bottom < a.bottom;
  };
  assert.ok(holds("network:red/red-db", "pod:red/db-0"));
  assert.ok(holds("vpc:red", "network:red/red-db"));
  assert.ok(!holds("vpc:blue", "pod:red/db-0"));
});

test("places stay while only traffic changes", () => {
  const before = layout(readGraph(three({ tick: 0 })), 1.5).places;
  assert.deepEqual(layout(readGraph(three({ tick: 9 })), 1.5).places, before);
});

test("a dropped edge is marked, and says its reason", () => {
  const { elements } = toElements(readGraph(three()), 1.5);
  const edge = elements.find((element) => element.data.target === "outside:8.8.8.8");
  assert.deepEqual(edge.classes, ["dropped"]);
  assert.equal(edge.data.label, "outside_vpc");
});

test("curves are numbers, also between tiles of one column", () => {
  for (const { group, data } of toElements(readGraph(three()), 1.5).elements) {
    if (group === "edges") assert.ok([...data.weights, ...data.distances].every(Number.isFinite), data.id);
  }
});

test("a label leaves the tile on its curve's middle", () => {
  const curve = { points: [{ x: 0, y: 0 }, { x: 250, y: 0 }, { x: 250, y: 0 }, { x: 500, y: 0 }] };
  const tile = { x: 250, y: 0, width: 60, height: 30, isBox: false };
  const { x, y } = freeLabels([["edge", curve, "reason"]], new Map([["pod", tile]])).get("edge");
  assert.ok(!overlaps(tile, { x: 250 + x, y, width: 50, height: 20 }));
});

test("two labels of one curve do not overlap", () => {
  const curve = { points: [{ x: 0, y: 0 }, { x: 250, y: 0 }, { x: 250, y: 0 }, { x: 500, y: 0 }] };
  const shifts = freeLabels([["one", curve, "reason"], ["other", curve, "reason"]], new Map());
  const size = { width: 50, height: 20 };
  assert.ok(!overlaps({ ...shifts.get("one"), ...size }, { ...shifts.get("other"), ...size }));
});

test("a drop between pods of one tile marks the tile", () => {
  const { elements } = toElements(readGraph(many()), 1.5);
  const tile = elements.find((element) => element.data.id === "network:red-net-40");
  assert.ok(tile.classes.includes("drops-inside"));
});
