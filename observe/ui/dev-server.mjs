// Serves dist/ as thuban-observe does, with the same CSP, and plays graphs of fixtures.mjs.
//
// node dev-server.mjs [PORT]; the port is printed. The page's ?namespace= chooses what is played: three, many, empty,
// off, planted (the first drop comes after a POST to /plant), cut-off (the stream ends after two seconds), loading. Any
// other namespace is refused.

import { readFile } from "node:fs/promises";
import { createServer } from "node:http";

import { empty, many, three } from "./fixtures.mjs";

const CSP =
  "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; " +
  "font-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'";
const TYPES = { html: "text/html; charset=utf-8", js: "text/javascript", css: "text/css", svg: "image/svg+xml" };
const MOMENT = 2000;

const opened = Date.now();
let isPlanted = false;
const isLater = (start) => Date.now() - start > MOMENT;
const PLAYS = {
  three: (_, tick) => three({ tick }),
  many,
  empty: () => empty("drops"),
  off: () => empty("off"),
  planted: (_, tick) => three({ hasDrops: isPlanted, tick }),
  "cut-off": (start, tick) => (isLater(start) ? null : three({ tick })),
  loading: () => undefined,
};

function play(response, name) {
  const start = Date.now();
  let tick = 0;
  response.writeHead(200, { "content-type": "text/event-stream", "cache-control": "no-store" });
  response.flushHeaders();
  const send = () => {
    const graph = PLAYS[name](start, tick++);
    if (graph === null) response.destroy();
    else if (graph) response.write(`event: graph\ndata: ${JSON.stringify(graph)}\n\n`);
  };
  send();
  const timer = setInterval(send, 1000);
  response.on("close", () => clearInterval(timer));
}

function answer(response, status, body) {
  response.writeHead(status, { "content-type": "application/json" });
  response.end(JSON.stringify(body));
}

async function asset(response, path) {
  try {
    const body = await readFile(new URL(`dist${path === "/" ? "/index.html" : path}`, import.meta.url));
    const type = TYPES[path === "/" ? "html" : path.split(".").pop()] ?? "text/plain";
    response.writeHead(200, { "content-type": type, "content-security-policy": CSP });
    response.end(body);
  } catch {
    answer(response, 404, { error: `no file ${path}` });
  }
}

const server = createServer((request, response) => {
  const url = new URL(request.url, "http://localhost");
  if (request.method === "POST" && url.pathname === "/plant") {
    isPlanted = true;
    return answer(response, 200, {});
  }
  const name = url.searchParams.get("namespace") ?? "three";
  if (!url.pathname.startsWith("/v1/")) return asset(response, url.pathname);
  if (!Object.hasOwn(PLAYS, name)) {
    return answer(response, 403, { error: `you may not get flows.thuban.dev in namespace ${name}` });
  }
  if (name === "cut-off" && isLater(opened)) return answer(response, 503, { error: "no droplet yet" });
  if (url.pathname === "/v1/graph/events") return play(response, name);
  return answer(response, 200, PLAYS[name](opened, 0) ?? {});
});

server.listen(Number(process.argv[2] ?? 8080), "127.0.0.1", () => {
  console.log(`http://127.0.0.1:${server.address().port}/?namespace=three`);
});
