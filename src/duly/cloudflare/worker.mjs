// duly's Worker: a gateway to D1 in the shape of Cloudflare's v4 REST API.
//
//   POST …/d1/database/:db/query   {"sql", "params"} or {"batch": [{"sql", "params"}, …]}   rows as objects
//   POST …/d1/database/:db/raw     the same                                                 rows as arrays, with columns
//
// The account's own API allows 1,200 requests in five minutes; a Worker beside the database has no such limit.
// A batch commits as one or not at all. Needs the binding DB, the variable DB_ID (the :db of the path) and the
// secret API_TOKEN; may have MAX_BODY_BYTES.

const DEFAULT_MAX_BODY_BYTES = 16 * 1024 * 1024;
const ROUTE = /\/d1\/database\/([^/]+)\/(query|raw)$/;

export default {
  async fetch(request, env) {
    try {
      return await answer(request, env);
    } catch (error) {
      if (error instanceof Refusal) return error.response();
      console.error(error);
      return new Refusal(500, 7500, messageOf(error)).response();
    }
  },
};

async function answer(request, env) {
  await authenticate(request, env);
  const { database, raw } = route(request, env);
  const { statements, isBatch } = readStatements(await readBody(request, env));
  const prepared = bindAll(env.DB, statements);
  try {
    const result = raw && !isBatch ? [await runRaw(prepared[0])] : await runAll(env.DB, prepared, isBatch, raw);
    return Response.json({ success: true, errors: [], messages: [], result });
  } catch (error) {
    throw refusalOf(error, database);
  }
}

class Refusal extends Error {
  constructor(status, code, message, headers = {}) {
    super(message);
    Object.assign(this, { status, code, headers });
  }

  response() {
    const errors = [{ code: this.code, message: this.message }];
    const { status, headers } = this;
    return Response.json({ success: false, errors, messages: [], result: null }, { status, headers });
  }
}

// Digests of equal length are compared, so neither content nor length of the token shows in the time taken.
async function authenticate(request, env) {
  if (!env.API_TOKEN) throw new Refusal(500, 10001, "The gateway has no API_TOKEN, so it lets nobody in");
  const [, token] = /^Bearer +(\S+)$/i.exec(request.headers.get("authorization") ?? "") ?? [];
  if (!token) {
    throw new Refusal(401, 10000, "Authentication error: no bearer token", { "www-authenticate": "Bearer" });
  }
  const digest = (text) => crypto.subtle.digest("SHA-256", new TextEncoder().encode(text));
  const [given, expected] = await Promise.all([digest(token), digest(env.API_TOKEN)]);
  if (!crypto.subtle.timingSafeEqual(given, expected)) throw new Refusal(403, 10000, "Authentication error: wrong token");
}

function route(request, env) {
  const { pathname } = new URL(request.url);
  const [, database, verb] = ROUTE.exec(pathname) ?? [];
  if (!database) throw new Refusal(404, 7003, `Could not route to ${pathname}`);
  if (request.method !== "POST") throw new Refusal(405, 7001, `${request.method} is not taken here`, { allow: "POST" });
  if (database !== env.DB_ID) throw new Refusal(404, 7404, `The database ${database} could not be found`);
  return { database, raw: verb === "raw" };
}

// A body too large is read to its end and dropped: who is cut off while sending never sees the answer.
async function readBody(request, env) {
  const limit = Number(env.MAX_BODY_BYTES) || DEFAULT_MAX_BODY_BYTES;
  const decoder = new TextDecoder();
  let size = 0;
  let text = "";
  for await (const chunk of request.body ?? []) {
    size += chunk.byteLength;
    text = size > limit ? "" : text + decoder.decode(chunk, { stream: true });
  }
  if (size > limit) throw new Refusal(413, 7413, `The request is larger than ${limit} bytes`);
  return text + decoder.decode();
}

function readStatements(text) {
  let body;
  try {
    body = JSON.parse(text);
  } catch {
    throw new Refusal(400, 7400, "The body is not JSON");
  }
  const isBatch = Array.isArray(body?.batch);
  const statements = isBatch ? body.batch : [body];
  if (statements.length === 0 || !statements.every(isStatement)) {
    throw new Refusal(400, 7400, 'The body must be {"sql", "params"} or {"batch": [{"sql", "params"}, …]}');
  }
  return { statements, isBatch };
}

function isStatement(it) {
  return typeof it?.sql === "string" && (it.params === undefined || (Array.isArray(it.params) && it.params.every(isValue)));
}

function isValue(it) {
  return it === null || ["string", "number", "boolean"].includes(typeof it);
}

function bindAll(db, statements) {
  try {
    return statements.map(({ sql, params = [] }) => db.prepare(sql).bind(...params));
  } catch (error) {
    throw new Refusal(400, 7500, messageOf(error));
  }
}

async function runAll(db, prepared, isBatch, raw) {
  const answers = isBatch ? await db.batch(prepared) : [await prepared[0].all()];
  return answers.map(({ results, success, meta }) => ({ results: raw ? asArrays(results) : results, success, meta }));
}

// D1 tells the columns of an empty answer only here, and only here says nothing of what changed.
async function runRaw(statement) {
  const [columns, ...rows] = await statement.raw({ columnNames: true });
  return { results: { columns: columns ?? [], rows }, success: true, meta: {} };
}

function asArrays(results) {
  const columns = Object.keys(results[0] ?? {});
  return { columns, rows: results.map((row) => columns.map((column) => row[column])) };
}

// A mistake in the statement, which no repetition mends; everything else is trouble of the platform.
const MISTAKE = new RegExp(
  [
    "SQLITE_(ERROR|CONSTRAINT|AUTH|TOOBIG|MISMATCH|RANGE)",
    "D1_TYPE_ERROR",
    "^To execute a transaction, please use",
    "^Wrong number of parameter bindings",
    "^No SQL statements detected",
  ].join("|"),
);

function refusalOf(error, database) {
  const message = messageOf(error);
  const isMistake = MISTAKE.test(message);
  if (!isMistake) console.error(`database ${database}: ${message}`);
  return new Refusal(isMistake ? 400 : 500, 7500, message);
}

function messageOf(error) {
  return String(error?.message ?? error).replace(/^D1_ERROR: /, "");
}
