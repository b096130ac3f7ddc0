// The stream of graphs: opens it, and opens it again when it is lost, later each time.

const FIRST_RETRY = 1000;
const MAX_RETRY = 30_000;

/**
 * Tells `onGraph` each graph, and `onState` each change: {kind: "loading"}, {kind: "live"}, or {kind: "cut-off", since,
 * retryAt, cause}.
 */
export function follow(scope, onGraph, onState) {
  let delay = FIRST_RETRY;
  let since = null;
  let told = null;

  const tell = (state) => {
    told = state;
    onState(state);
  };

  const open = () => {
    const source = new EventSource(`/v1/graph/events?${scope}`);
    source.addEventListener("graph", (event) => {
      delay = FIRST_RETRY;
      since = null;
      tell({ kind: "live" });
      onGraph(JSON.parse(event.data));
    });
    source.addEventListener("error", async () => {
      // A source tries again by itself only after some errors, and does not say when.
      source.close();
      since ??= Date.now();
      const state = { kind: "cut-off", since, retryAt: Date.now() + delay, cause: "" };
      tell(state);
      setTimeout(open, delay);
      delay = Math.min(MAX_RETRY, delay * 2);
      const cause = await refusal(scope);
      if (told === state && cause) tell({ ...state, cause });
    });
  };

  tell({ kind: "loading" });
  open();
}

/** Returns what thuban-observe says against the request: an EventSource does not tell it. */
async function refusal(scope) {
  try {
    const answer = await fetch(`/v1/graph?${scope}`);
    return answer.ok ? "" : ((await answer.json()).error ?? "");
  } catch {
    return "";
  }
}
