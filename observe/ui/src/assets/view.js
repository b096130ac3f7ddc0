// The graph on the screen: keeps Cytoscape in step with the model. All colours are CSS variables of style.css.

import cytoscape from "./cytoscape.js";
import { toElements } from "./elements.js";

const FONT = "system-ui, sans-serif";
const MARGIN = 24;
const ZOOM_STEP = 1.3;

function sheet(container) {
  const computed = getComputedStyle(container);
  const colour = (name) => computed.getPropertyValue(`--${name}`).trim();
  const node = {
    shape: "round-rectangle",
    width: "data(width)",
    height: "data(height)",
    label: "data(label)",
    color: colour("text"),
    "font-family": FONT,
    "min-zoomed-font-size": 5,
    "z-index-compare": "manual",
  };
  const tile = {
    "background-color": colour("tile"),
    "border-color": colour("border-strong"),
    "border-width": 1,
    "corner-radius": 7,
    "font-size": 13,
    "text-valign": "center",
    "text-wrap": "ellipsis",
    "text-max-width": (own) => `${own.data("width") - 4}px`,
    "z-index": 4,
  };
  const box = {
    "background-color": colour("box"),
    "border-color": colour("border"),
    "border-width": 1,
    "corner-radius": 10,
    "font-size": 13,
    "font-weight": 600,
    "text-valign": "top",
    "text-halign": "right",
    "text-margin-x": (own) => 14 - own.data("width"),
    "text-margin-y": 24,
    "z-index": 1,
  };
  const edge = {
    width: "data(width)",
    "line-color": colour("edge"),
    "line-opacity": 0.75,
    "curve-style": "unbundled-bezier",
    "edge-distances": "endpoints",
    "control-point-weights": (own) => own.data("weights"),
    "control-point-distances": (own) => own.data("distances"),
    "source-endpoint": (own) => own.data("sourceEnd").map((part) => `${part}px`).join(" "),
    "target-endpoint": (own) => own.data("targetEnd").map((part) => `${part}px`).join(" "),
    "target-arrow-shape": "triangle",
    "target-arrow-color": colour("edge"),
    "arrow-scale": 0.8,
    "z-index-compare": "manual",
    "z-index": 2,
  };
  const dropped = {
    "line-color": colour("drop"),
    "line-opacity": 1,
    "line-style": "dashed",
    "target-arrow-color": colour("drop"),
    "target-arrow-shape": "tee",
    width: 3,
    label: "data(label)",
    color: colour("drop"),
    "font-family": FONT,
    "font-size": 12,
    "font-weight": 600,
    "text-margin-x": (own) => own.data("shift").x,
    "text-margin-y": (own) => own.data("shift").y,
    "text-background-color": colour("surface"),
    "text-background-opacity": 1,
    "text-background-padding": 3,
    "text-background-shape": "round-rectangle",
    "z-index": 3,
  };
  const chosen = {
    "border-color": colour("accent"),
    "border-width": 3,
    "line-color": colour("accent"),
    "target-arrow-color": colour("accent"),
    "z-index": 6,
  };
  // In a compact graph labels would hide the tiles' names, so they come with a closer look.
  const closer = { "font-size": 9, "min-zoomed-font-size": 11, "z-index": 5 };
  const compactBox = { "text-margin-y": 20, "text-margin-x": (own) => 10 - own.data("width") };
  const styles = {
    node,
    ".tile": tile,
    ".compact.tile": { "font-size": 11, "corner-radius": 5 },
    ".box": box,
    ".compact.box": compactBox,
    ".vpc": { "background-color": colour("vpc"), "font-size": 15, "z-index": 0 },
    ".service": { "border-color": colour("accent"), "border-width": 2, "corner-radius": 17 },
    ".role": { "background-opacity": 0, "border-style": "dashed", color: colour("muted") },
    ".droplet": { "background-color": colour("droplet"), "corner-radius": 2 },
    ".outside, .withheld": { "background-color": colour("box"), "border-style": "dotted", "border-width": 2 },
    ".drops-inside": { "border-color": colour("drop"), "border-style": "dashed", "border-width": 2 },
    ".away": { "border-color": colour("drop"), "border-width": 2, color: colour("drop") },
    edge,
    ".dropped": dropped,
    ".compact.dropped": closer,
    ".faded": { opacity: 0.28 },
    ".chosen": chosen,
    ".chosen.dropped": { "line-color": colour("drop"), "target-arrow-color": colour("drop"), width: 4 },
    core: { "active-bg-opacity": 0 },
  };
  return Object.entries(styles).map(([selector, style]) => ({ selector, style }));
}

/** Makes the graph in the container. `onSelect` gets the id of what was clicked, or null for the background. */
export function makeView(container, onSelect) {
  const cy = cytoscape({
    container,
    style: sheet(container),
    layout: { name: "preset" },
    autoungrabify: true,
    autounselectify: true,
    boxSelectionEnabled: false,
    minZoom: 0.05,
    maxZoom: 3,
  });
  let shown = null;
  let places = "";
  let aspect = 1.5;
  // A reader who has moved the graph keeps its place.
  let isMoved = false;

  cy.on("tap", (event) => onSelect(event.target === cy ? null : event.target.id()));
  cy.on("dragpan scrollzoom pinchzoom", () => {
    isMoved = true;
  });

  const fit = () => {
    cy.resize();
    // Labels of boxes count as if they stood beside them.
    cy.fit(cy.nodes().boundingBox({ includeLabels: false }), MARGIN);
    // Few tiles would become huge.
    if (cy.zoom() > 1.25) cy.zoom(1.25).center();
  };
  const zoom = (factor) => {
    isMoved = true;
    cy.zoom({ level: cy.zoom() * factor, renderedPosition: { x: cy.width() / 2, y: cy.height() / 2 } });
  };
  const show = (graph, found, selected) => {
    shown = [graph, found, selected];
    if (!isMoved && container.clientHeight > 0) aspect = container.clientWidth / container.clientHeight;
    const { elements, isCompact } = toElements(graph, aspect);
    cy.batch(() => {
      replace(cy, elements, isCompact);
      mark(cy, found, selected);
    });
    const next = JSON.stringify(elements.map((element) => element.position));
    if (next !== places && !isMoved) fit();
    places = next;
  };

  new ResizeObserver(() => {
    if (shown) show(...shown);
    if (!isMoved) fit();
  }).observe(container);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => cy.style(sheet(container)));
  const fitAgain = () => {
    isMoved = false;
    if (shown) show(...shown);
    fit();
  };
  return { show, fit: fitAgain, zoomIn: () => zoom(ZOOM_STEP), zoomOut: () => zoom(1 / ZOOM_STEP) };
}

/** Changes what differs. Elements that stay keep their identity, so that nothing blinks. */
function replace(cy, elements, isCompact) {
  const wanted = new Set(elements.map((element) => element.data.id));
  cy.elements().filter((element) => !wanted.has(element.id())).remove();
  for (const element of elements) {
    if (isCompact) element.classes.push("compact");
    const present = cy.getElementById(element.data.id);
    if (present.empty()) cy.add(element);
    else {
      present.data(element.data);
      present.classes(element.classes);
      if (element.position) present.position(element.position);
    }
  }
}

/** Fades what the search does not find, but no end of an edge found; and what is not near the selected element. */
function mark(cy, found, selected) {
  const chosen = selected ? cy.getElementById(selected) : cy.collection();
  const near = chosen.isEdge() ? chosen.union(chosen.connectedNodes()) : chosen.closedNeighborhood();
  const isBox = chosen.hasClass("box");
  const hits = cy.elements().filter((element) => found.has(element.id()));
  const bright = hits.union(hits.connectedNodes());
  cy.elements().forEach((element) => {
    const isFar = chosen.nonempty() && !isBox && !near.has(element) && !element.hasClass("box");
    element.toggleClass("faded", isFar || !(bright.has(element) || element.hasClass("box")));
  });
  chosen.addClass("chosen");
}
