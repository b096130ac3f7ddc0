// What the page says about itself and about a graph that has nothing to show. Pure.

import { count, time } from "./format.js";

/** Returns the state's short word and what a person hears of it. `stream` is what stream.js tells. */
export function describeState(stream, now) {
  if (stream.kind === "live") return { word: "Live", text: "The page is live." };
  if (stream.kind === "loading") return { word: "Loading", text: "The page waits for the first graph." };
  const seconds = Math.max(0, Math.ceil((stream.retryAt - now) / 1000));
  const next = seconds > 0 ? `Next try in ${seconds} s.` : "Trying again.";
  return { word: `Cut off since ${time(stream.since)}`, text: next };
}

/** Returns the notices above the graph, as {kind, title, text}. */
export function notices(stream, graph, now) {
  const found = [];
  if (stream.kind === "cut-off") {
    const { word, text } = describeState(stream, now);
    const old = graph ? " The page shows what it knew then." : "";
    const cause = stream.cause ? `thuban-observe says: ${stream.cause}.` : "thuban-observe sends nothing.";
    found.push({ kind: "error", title: `${word}.`, text: `${cause}${old} ${text}` });
  }
  if (graph?.isTruncated) {
    found.push({
      kind: "warning",
      title: "Truncated.",
      text:
        "There is more here than a graph can show, so each network stands for its pods. " +
        "Ask for one namespace, or use kubectl thuban flows.",
    });
  }
  const away = graph?.droplets.filter((droplet) => !droplet.connected) ?? [];
  if (away.length > 0 && away.length < graph.droplets.length) {
    const names = away.slice(0, 3).map((droplet) => droplet.name);
    const more = away.length > names.length ? ` and ${count(away.length - names.length)} more` : "";
    found.push({
      kind: "warning",
      title: "Incomplete.",
      text: `No flows come from ${names.join(", ")}${more}: not connected to thuban-observe.`,
    });
  }
  // Without any object the same words stand in the graph's place.
  if (graph?.nodes.size > 0 && graph.edges.length === 0) {
    const { title, text } = emptyReason(graph);
    found.push({ kind: "plain", title: `${title}.`, text });
  }
  return found;
}

/** Returns {title, text} for the graph's place while it has nothing to show, else null. */
export function placeholder(stream, graph) {
  if (graph) return graph.nodes.size > 0 ? null : emptyReason(graph);
  if (stream.kind === "cut-off") return { title: "No graph yet", text: "The graph comes with the connection." };
  return { title: "Loading", text: "Waiting for the first graph." };
}

/** Returns why a graph may have no flows, as {title, text}. */
function emptyReason(graph) {
  const connected = graph.droplets.filter((droplet) => droplet.connected);
  if (connected.length === 0) {
    return {
      title: "No droplet is connected",
      text: "No node sends its flows to thuban-observe. Look at the log of transitd.",
    };
  }
  const modes = new Set(connected.map((droplet) => droplet.mode));
  if (modes.size === 1 && modes.has("off")) {
    return {
      title: "Flows are off",
      text: "THUBAN_FLOWS of transitd is off, so nodes tell nothing. Set it to drops or all.",
    };
  }
  if (!modes.has("all")) {
    return {
      title: "No drops in the last minute",
      text: "Nodes tell only what they drop, because THUBAN_FLOWS of transitd is drops. With all they tell all flows.",
    };
  }
  return { title: "No flows in the last minute", text: "No pod that you may see has sent or received a packet." };
}
