import assert from "node:assert/strict";
import { test } from "node:test";

import { bytes, counted, edgeWidth, fullName, shorten, shortName } from "../src/assets/format.js";
import { mainReason, readGraph } from "../src/assets/model.js";
import { search } from "../src/assets/search.js";
import { three } from "../fixtures.mjs";

test("bytes have a unit that fits", () => {
  assert.deepEqual([0, 999, 1000, 4200, 61_000_000, 9.96e12].map(bytes), [
    "0 B",
    "999 B",
    "1.0 kB",
    "4.2 kB",
    "61 MB",
    "10 TB",
  ]);
});

test("one packet has no plural", () => {
  assert.equal(counted(1, "packet"), "1 packet");
  assert.equal(counted(12_345, "packet"), "12,345 packets");
});

test("more bytes never make a thinner edge", () => {
  const widths = [0, 10, 1e4, 1e8, 1e12].map(edgeWidth);
  assert.deepEqual(widths, [...widths].sort((one, other) => one - other));
  assert.equal(widths[0], 1);
  assert.equal(widths[4], 7);
});

test("a long name keeps its beginning and its end", () => {
  assert.equal(shorten("backup-28814400-x7k2p", 15), "backup-…0-x7k2p");
  assert.equal(shorten("web-0", 15), "web-0");
});

test("a withheld peer has no name", () => {
  const node = { kind: "withheld", name: "secret", namespace: "blue" };
  assert.equal(fullName(node), "withheld");
  assert.equal(shortName(node), "withheld");
});

test("a network without a node gets one", () => {
  const graph = readGraph({ vpcs: [{ name: "red", networks: ["a"] }] });
  assert.equal(graph.nodes.get("network:red/a").kind, "network");
});

test("an edge without its end is kept", () => {
  const graph = readGraph({ edges: [{ from: "pod:a/b", to: "pod:a/c", dropped: 1 }] });
  assert.equal(graph.edges.length, 1);
  assert.equal(graph.nodes.get("pod:a/b").kind, "unknown");
});

test("an empty answer is an empty graph", () => {
  const graph = readGraph({});
  assert.deepEqual([graph.nodes.size, graph.edges, graph.isTruncated], [0, [], false]);
});

test("the reason with most packets is the edge's", () => {
  const reasons = [
    { reason: "few", packets: 1 },
    { reason: "most", packets: 9 },
  ];
  assert.equal(mainReason({ dropped: 10, reasons }), "most");
  assert.equal(mainReason({ dropped: 0, reasons: [] }), "");
});

test("search finds by name, address and reason", () => {
  const graph = readGraph(three());
  assert.ok(search(graph, "WEB-0").has("pod:red/web-0"));
  assert.ok(search(graph, "10.0.2.4").has("pod:red/db-0"));
  assert.deepEqual([...search(graph, "outside_vpc")], ["edge:pod:red/web-0>outside:8.8.8.8"]);
});

test("all words of a search must fit", () => {
  const graph = readGraph(three());
  assert.ok(search(graph, "web-0 dropped").has("edge:pod:red/web-0>outside:8.8.8.8"));
  assert.equal(search(graph, "web-0 policy_ingress").size, 0);
});
