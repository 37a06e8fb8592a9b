// node run.mjs '{"project", "modules", "bindings", "database", "persist", "folder"}'
// Runs the Worker of a project in Cloudflare's runtime, prints one JSON line when it answers, and ends when stdin does,
// removing the folder, for the test run may have been killed and cannot.
import { readFileSync, rmSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { Miniflare } from "miniflare";

const { project, modules, bindings, database, persist, folder } = JSON.parse(process.argv[2]);

const runtime = new Miniflare({
  host: "127.0.0.1",
  port: 0,
  cf: false,
  defaultPersistRoot: persist,
  name: "duly",
  modules: modules.map((path) => ({ type: "ESModule", path, contents: readFileSync(join(project, path), "utf8") })),
  compatibilityDate: "2026-04-01",
  bindings,
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
