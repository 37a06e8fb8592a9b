// node run.mjs '{"worker", "token", "database", "persist", "maxBodyBytes"?, "folder"}'
// Runs the Worker in Cloudflare's runtime, prints one JSON line when it answers, and ends when stdin does,
// removing the folder, for the test run may have been killed and cannot.
import { readFileSync, rmSync } from "node:fs";
import { createRequire } from "node:module";
import { basename } from "node:path";
import { Miniflare } from "miniflare";

const { worker, token, database, persist, maxBodyBytes, folder } = JSON.parse(process.argv[2]);

const runtime = new Miniflare({
  host: "127.0.0.1",
  port: 0,
  cf: false,
  defaultPersistRoot: persist,
  name: "duly",
  modules: [{ type: "ESModule", path: basename(worker), contents: readFileSync(worker, "utf8") }],
  compatibilityDate: "2026-04-01",
  bindings: { API_TOKEN: token, DB_ID: database, MAX_BODY_BYTES: maxBodyBytes ?? "" },
  d1Databases: { DB: database },
});

async function stop() {
  await runtime.dispose();
  rmSync(folder, { recursive: true, force: true });
  process.exit(0);
}

process.on("SIGTERM", stop);
process.stdin.on("end", stop).resume();

const url = new URL(await runtime.ready);
const { version } = createRequire(import.meta.url)("miniflare/package.json");
console.log(JSON.stringify({ host: url.hostname, port: Number(url.port), miniflare: version }));
