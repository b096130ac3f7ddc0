// The page: the stream's graph, shown by the graph, the list and the details, which share one selection and one search.

import { makeDetails } from "./details.js";
import { byId, make, setText } from "./dom.js";
import { fullName } from "./format.js";
import { makeList } from "./list.js";
import { mainReason, readGraph } from "./model.js";
import { search } from "./search.js";
import { describeState, notices, placeholder } from "./states.js";
import { follow } from "./stream.js";
import { makeView } from "./view.js";

const NO_GRAPH = readGraph({});

let graph = null;
let stream = { kind: "loading" };
let selected = null;
let listView = "flows";
/** The drops that were told, so that each is told once. */
let toldDrops = null;

const view = makeView(byId("graph"), select);
const list = makeList(byId("table"), select);
const details = makeDetails(byId("details"), select);

function select(id) {
  selected = id;
  if (id) {
    const edge = graph?.edges.find((candidate) => candidate.id === id);
    const node = graph?.nodes.get(id);
    const drop = edge?.dropped > 0 ? `, dropped: ${mainReason(edge)}` : "";
    if (node) say(`Selected ${fullName(node)}`);
    if (edge) say(`Selected ${flowName(edge)}${drop}`);
  }
  render();
  // The details have taken room from the list.
  list.reveal(id);
}

function flowName(edge) {
  return `${fullName(graph.nodes.get(edge.from))} to ${fullName(graph.nodes.get(edge.to))}`;
}

/** Has a screen reader say a text. */
function say(text) {
  setText(byId("live"), text);
}

function render() {
  const shown = graph ?? NO_GRAPH;
  const found = search(shown, byId("search").value);
  view.show(shown, found, selected);
  const { shown: rows, all } = list.show(listView, shown, found, selected);
  setText(byId("count"), rows < all ? `${rows} of ${all}: search for fewer` : String(all));
  details.show(shown, selected);
  renderState();
}

function renderState() {
  const now = Date.now();
  const state = byId("state");
  setText(state, describeState(stream, now).word);
  state.dataset.state = stream.kind;
  const found = notices(stream, graph, now).map(({ kind, title, text }) =>
    make("p", { className: `notice ${kind}` }, make("strong", {}, title), " ", text),
  );
  const box = byId("notices");
  if (box.textContent !== found.map((notice) => notice.textContent).join("")) box.replaceChildren(...found);
  const words = placeholder(stream, graph);
  const place = byId("placeholder");
  place.hidden = words === null;
  if (words && place.textContent !== words.title + words.text) {
    place.replaceChildren(make("h2", {}, words.title), make("p", {}, words.text));
  }
}

function takeGraph(json) {
  graph = readGraph(json);
  const dropped = graph.edges.filter((edge) => edge.dropped > 0);
  const drops = new Map(dropped.map((edge) => [`${edge.id} ${mainReason(edge)}`, edge]));
  const fresh = [...drops].filter(([key]) => toldDrops && !toldDrops.has(key));
  if (fresh.length === 1) say(`New drop: ${flowName(fresh[0][1])}, ${mainReason(fresh[0][1])}`);
  if (fresh.length > 1) say(`${fresh.length} new drops. The list has them first.`);
  toldDrops = new Set(drops.keys());
  render();
}

function takeState(next) {
  if (next.kind !== stream.kind) {
    const { word, text } = describeState(next, Date.now());
    say(`${word}. ${text}`);
  }
  stream = next;
  renderState();
}

function showView(name) {
  listView = name;
  for (const other of ["flows", "objects"]) byId(`show-${other}`).setAttribute("aria-pressed", String(other === name));
  render();
}

/** Returns the part of the page's own address that asks for a namespace, or null. */
function scopeOf(parameters) {
  const namespace = parameters.get("namespace");
  if (namespace) return { query: new URLSearchParams({ namespace }), name: `namespace ${namespace}` };
  if (parameters.get("all") === "true") return { query: new URLSearchParams({ all: "true" }), name: "all namespaces" };
  return null;
}

function start() {
  byId("search").addEventListener("input", render);
  byId("show-flows").addEventListener("click", () => showView("flows"));
  byId("show-objects").addEventListener("click", () => showView("objects"));
  byId("zoom-in").addEventListener("click", view.zoomIn);
  byId("zoom-out").addEventListener("click", view.zoomOut);
  byId("zoom-fit").addEventListener("click", view.fit);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") select(null);
    if (event.key === "/" && document.activeElement !== byId("search")) {
      byId("search").focus();
      event.preventDefault();
    }
  });
  const scope = scopeOf(new URLSearchParams(location.search));
  if (!scope) {
    const question = make("strong", {}, "Which namespace? ");
    const text = "Add ?namespace=NAME or ?all=true to the address of this page. kubectl thuban ui does so.";
    byId("notices").replaceChildren(make("p", { className: "notice error" }, question, text));
    setText(byId("state"), "No namespace");
    return;
  }
  setText(byId("scope"), scope.name);
  document.title = `${scope.name} · Thuban flows`;
  render();
  follow(scope.query, takeGraph, takeState);
  // The time to the next try is counted down.
  setInterval(() => stream.kind === "cut-off" && renderState(), 1000);
}

start();
