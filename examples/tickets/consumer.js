// A consumer in plain JavaScript, without packages: node consumer.js NAME REDIS_PORT MASTER_URL TOKEN STREAM GROUP [LOG]
// It registers, reads the messages that the master assigned to it, processes one at a time, and acknowledges each.
const net = require("node:net"), http = require("node:http"), fs = require("node:fs");
const [name, port, master, token, stream, group, log] = process.argv.slice(2);

// Redis: commands go out as RESP arrays, and replies come back in order.
const socket = net.connect(Number(port), "127.0.0.1"), waiting = [];
let buffer = Buffer.alloc(0);
function parse(at) { // returns the value at `at` and the start of the next one; undefined while it is incomplete
  const end = buffer.indexOf("\r\n", at);
  if (end < 0) return undefined;
  const head = buffer.toString("utf8", at + 1, end), kind = String.fromCharCode(buffer[at]);
  if ("+-:".includes(kind)) return [kind === "-" ? new Error(head) : head, end + 2];
  const length = Number(head);
  if (length < 0) return [null, end + 2];
  if (kind === "$") {
    const stop = end + 2 + length;
    return buffer.length < stop + 2 ? undefined : [buffer.toString("utf8", end + 2, stop), stop + 2];
  }
  const items = [];
  for (at = end + 2; items.length < length; ) {
    const item = parse(at);
    if (!item) return undefined;
    items.push(item[0]);
    at = item[1];
  }
  return [items, at];
}
socket.on("data", (data) => {
  buffer = Buffer.concat([buffer, data]);
  for (let found; buffer.length && (found = parse(0)); buffer = buffer.subarray(found[1])) waiting.shift()(found[0]);
});
const redis = (...words) => new Promise((resolve, reject) => {
  waiting.push((reply) => (reply instanceof Error ? reject(reply) : resolve(reply)));
  socket.write(`*${words.length}\r\n` + words.map((word) => `$${Buffer.byteLength(word)}\r\n${word}\r\n`).join(""));
});
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const post = (path, body) => fetch(master + path, { method: "POST", body: JSON.stringify({ consumer: name, ...body }),
  headers: { "Content-Type": "application/json", Authorization: `Bearer ${token}` } });
const record = (kind, id, key) => log && fs.appendFileSync(log,
  JSON.stringify({ kind, id, key, stream, worker: name, at: Number(process.hrtime.bigint()) / 1e6 }) + "\n");

async function main(healthUrl) {
  while (!(await post("/api/consumers/register", { health_url: healthUrl }).then((reply) => reply.ok, () => false))) await sleep(200);
  for (;;) {
    const read = await redis("XREADGROUP", "GROUP", group, name, "COUNT", "1", "STREAMS", stream, "0");
    for (const [id, pairs] of read ? read[0][1] : []) {
      const ticket = pairs[pairs.indexOf("ticket_id") + 1];
      record("started", id, ticket);
      await sleep(Number(process.env.WORK_MS || 5)); // the work
      for (const kind of ["ended", "committed"]) record(kind, id, ticket);
      await redis("XACK", stream, group, id);
      await post("/api/messages/acknowledge", { message_id: id }).catch(() => {}); // the master also detects it by itself
    }
    if (!read || !read[0][1].length) await sleep(20);
  }
}
const health = http.createServer((request, response) => response.end("ok"));
health.listen(0, "127.0.0.1", () => main(`http://127.0.0.1:${health.address().port}/api/health`));
