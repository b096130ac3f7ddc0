// The list beside the graph: the same data as a table, for the keyboard and screen readers. Arrow keys, Home and End
// move, Enter selects.

import { keepFocus, make, setText } from "./dom.js";
import { bytes, count, fullName, kindName } from "./format.js";
import { byWeight, mainReason } from "./model.js";

const MAX_ROWS = 500;

const orderOf = (node) => `${node.kind} ${fullName(node)}`;

const VIEWS = {
  flows: {
    label: "Flows of the last minute",
    columns: ["From", "To", "Bytes", "Verdict"],
    rows: (graph) => [...graph.edges].sort(byWeight),
    cells: (graph, edge) => [
      fullName(graph.nodes.get(edge.from)),
      fullName(graph.nodes.get(edge.to)),
      bytes(edge.bytes),
      edge.dropped > 0 ? `${mainReason(edge)}: ${count(edge.dropped)} dropped` : "passed",
    ],
    isDropped: (edge) => edge.dropped > 0,
  },
  objects: {
    label: "Objects of the graph",
    columns: ["Kind", "Name", "VPC", "Address"],
    rows: (graph) => [...graph.nodes.values()].sort((one, other) => (orderOf(one) < orderOf(other) ? -1 : 1)),
    cells: (_, node) => [kindName(node.kind), fullName(node), node.vpc ?? "", node.address ?? ""],
    isDropped: () => false,
  },
};

/** Makes a list of the table. `onSelect` gets the id of the row that was chosen. */
export function makeList(table, onSelect) {
  const [head, body] = [table.tHead, table.tBodies[0]];
  const rows = new Map();
  let current = null;

  const show = (viewName, graph, found, selected) => {
    const view = VIEWS[viewName];
    if (current !== viewName) {
      current = viewName;
      rows.clear();
      table.setAttribute("aria-label", view.label);
      head.replaceChildren(make("tr", {}, ...view.columns.map((name) => make("th", { scope: "col" }, name))));
    }
    const items = view.rows(graph).filter((item) => found.has(item.id));
    const shown = items.slice(0, MAX_ROWS);
    const order = shown.map((item) => {
      const row = rows.get(item.id) ?? newRow(item.id, view.columns.length);
      rows.set(item.id, row);
      view.cells(graph, item).forEach((text, column) => setText(row.cells[column], text));
      row.classList.toggle("dropped", view.isDropped(item));
      row.setAttribute("aria-selected", String(item.id === selected));
      return row;
    });
    arrange(order);
    return { shown: shown.length, all: items.length };
  };

  /** Rows keep their order while the keyboard is in the list, and so are not lost from under it. */
  const arrange = (order) => {
    const present = [...body.rows];
    const wanted = new Set(order);
    const isBusy = body.contains(document.activeElement);
    const kept = present.filter((row) => wanted.has(row));
    const next = isBusy ? [...kept, ...order.filter((row) => !kept.includes(row))] : order;
    const isSame = next.length === present.length && next.every((row, place) => row === present[place]);
    if (!isSame) keepFocus(body, () => body.replaceChildren(...next));
    for (const [id, row] of rows) if (!wanted.has(row)) rows.delete(id);
    if (!body.querySelector('tr[tabindex="0"]') && next[0]) next[0].tabIndex = 0;
  };

  const focus = (row) => {
    for (const other of body.rows) other.tabIndex = other === row ? 0 : -1;
    row.focus();
  };

  body.addEventListener("keydown", (event) => {
    const row = event.target.closest("tr");
    const targets = {
      ArrowDown: row?.nextElementSibling,
      ArrowUp: row?.previousElementSibling,
      Home: body.rows[0],
      End: body.rows[body.rows.length - 1],
    };
    if (event.key === "Enter" || event.key === " ") onSelect(row.dataset.id);
    else if (event.key in targets) {
      if (targets[event.key]) focus(targets[event.key]);
    } else return;
    event.preventDefault();
  });
  body.addEventListener("click", (event) => {
    const row = event.target.closest("tr");
    if (!row) return;
    focus(row);
    onSelect(row.dataset.id);
  });
  const reveal = (id) => rows.get(id)?.scrollIntoView({ block: "nearest" });

  return { show, reveal };
}

function newRow(id, columns) {
  const cells = Array.from({ length: columns }, () => make("td"));
  return make("tr", { tabIndex: -1, data: { id } }, ...cells);
}
