import assert from "node:assert/strict";
import { test } from "node:test";

import { readGraph } from "../src/assets/model.js";
import { describeState, notices, placeholder } from "../src/assets/states.js";
import { empty, many, three } from "../fixtures.mjs";

const LIVE = { kind: "live" };
const CUT = { kind: "cut-off", since: 0, retryAt: 5000, cause: "" };
const told = (stream, json, now = 0) => {
  const found = notices(stream, json && readGraph(json), now);
  return found.map(({ title, text }) => `${title} ${text}`);
};

test("a graph with flows needs no words", () => {
  assert.deepEqual(told(LIVE, three()), []);
  assert.equal(placeholder(LIVE, readGraph(three())), null);
});

test("no flows: the mode of the droplets says why", () => {
  assert.match(told(LIVE, empty("off"))[0], /^Flows are off/);
  assert.match(told(LIVE, empty("drops"))[0], /^No drops in the last minute/);
  assert.match(told(LIVE, empty("all"))[0], /^No flows in the last minute/);
  assert.match(told(LIVE, { ...empty(), droplets: [] })[0], /^No droplet is connected/);
});

test("no objects: the words stand in the graph's place", () => {
  assert.deepEqual(told(LIVE, {}), []);
  assert.equal(placeholder(LIVE, readGraph({})).title, "No droplet is connected");
});

test("a lost stream says since when, and when it is tried", () => {
  assert.match(told(CUT, null, 2000)[0], /^Cut off since .*sends nothing. Next try in 3 s/);
  assert.match(told(CUT, three(), 2000)[0], /what it knew then/);
  assert.match(describeState(CUT, 9000).text, /Trying again/);
  assert.equal(placeholder(CUT, null).title, "No graph yet");
});

test("what thuban-observe says against it is told", () => {
  assert.match(told({ ...CUT, cause: "you may not get flows" }, null)[0], /says: you may not get flows\./);
});

test("a truncated graph says so", () => {
  assert.match(told(LIVE, many())[0], /^Truncated/);
});

test("a droplet that is away is named", () => {
  const json = three();
  json.droplets[1].connected = false;
  assert.match(told(LIVE, json)[0], /No flows come from node-b: not connected/);
});

test("before the first graph the page waits", () => {
  assert.equal(placeholder({ kind: "loading" }, null).title, "Loading");
});
