// The details of what is selected: an object with its flows, or a flow with the meaning and remedy of its drops.

import { keepFocus, make } from "./dom.js";
import { bytes, count, counted, fullName, kindName } from "./format.js";
import { byWeight, mainReason } from "./model.js";

const MAX_FLOWS = 50;

/** Makes the panel. `onSelect` gets the id of what was chosen in it, or null when the panel was closed. */
export function makeDetails(panel, onSelect) {
  let written = "";

  panel.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) onSelect(button.dataset.select || null);
  });

  const show = (graph, id) => {
    const edge = graph.edges.find((candidate) => candidate.id === id);
    const node = graph.nodes.get(id);
    const content = edge ? edgeContent(graph, edge) : node ? nodeContent(graph, node) : hint(id);
    const text = content.map((part) => part.outerHTML).join("");
    if (text === written) return;
    written = text;
    keepFocus(panel, () => panel.replaceChildren(...content));
  };
  return { show };
}

function hint(id) {
  const text = id
    ? "What you have selected is not in the graph any more."
    : "Select a flow or an object, in the graph or in the list.";
  return [make("p", { className: "hint" }, text)];
}

function title(word, name) {
  const close = make("button", { type: "button", className: "close", data: { id: "close" } }, "×");
  close.setAttribute("aria-label", "Close the details");
  return make("div", { className: "title" }, make("h2", {}, make("small", {}, word), " ", name), close);
}

/** A list of terms; terms without a value are left out. */
function facts(pairs) {
  const known = pairs.filter(([, value]) => value !== undefined && value !== null && value !== "");
  return make("dl", {}, ...known.flatMap(([term, value]) => [make("dt", {}, term), make("dd", {}, value)]));
}

function link(id, text, className = "link") {
  return make("button", { type: "button", className, data: { id, select: id } }, text);
}

function edgeContent(graph, edge) {
  const end = (id) => link(id, fullName(graph.nodes.get(id)));
  const reasons = edge.reasons.map((reason) =>
    make(
      "div",
      { className: "reason" },
      make("h3", {}, `${reason.reason}: ${counted(reason.packets, "packet")} dropped`),
      facts([["Meaning", reason.meaning], ["Remedy", reason.remedy]]),
    ),
  );
  const counts = [["Bytes", bytes(edge.bytes)], ["Packets", count(edge.packets)], ["Dropped", count(edge.dropped)]];
  return [
    title("Flow", `${fullName(graph.nodes.get(edge.from))} → ${fullName(graph.nodes.get(edge.to))}`),
    ...reasons,
    facts([["From", end(edge.from)], ["To", end(edge.to)], ...counts]),
  ];
}

function nodeContent(graph, node) {
  const flows = graph.edges.filter((edge) => edge.from === node.id || edge.to === node.id).sort(byWeight);
  const sum = (side) => {
    const own = flows.filter((edge) => edge[side] === node.id);
    return bytes(own.reduce((all, edge) => all + edge.bytes, 0));
  };
  const state = node.state && (node.state.connected ? `connected, flows: ${node.state.mode}` : "not connected");
  const pairs = [
    ["Namespace", node.namespace],
    ["VPC", node.vpc],
    ["VNI", node.vni],
    ["Network", node.kind === "network" ? undefined : node.network],
    ["Networks", node.kind === "vpc" ? (node.networks ?? []).join(", ") : undefined],
    ["Address", node.address],
    ["Droplet", node.kind === "droplet" ? undefined : node.droplet],
    ["State", state],
  ];
  if (flows.length > 0) pairs.push(["Sent", sum("from")], ["Received", sum("to")]);
  if (node.kind === "withheld") {
    pairs.push(["Why", "Peers in namespaces that you may not see have no name here."]);
  }
  return [title(kindName(node.kind), fullName(node)), facts(pairs), ...flowList(graph, node, flows)];
}

function flowList(graph, node, flows) {
  if (flows.length === 0) return [];
  const items = flows.slice(0, MAX_FLOWS).map((edge) => {
    const isFrom = edge.from === node.id;
    const peer = fullName(graph.nodes.get(isFrom ? edge.to : edge.from));
    const verdict = edge.dropped > 0 ? `dropped, ${mainReason(edge)}` : bytes(edge.bytes);
    const text = `${isFrom ? "to" : "from"} ${peer}: ${verdict}`;
    return make("li", {}, link(edge.id, text, edge.dropped > 0 ? "link dropped" : "link"));
  });
  const more = flows.length - items.length;
  if (more > 0) items.push(make("li", {}, `${counted(more, "more flow")}: search for ${fullName(node)}`));
  return [make("h3", {}, "Flows of the last minute"), make("ul", {}, ...items)];
}
