// duly's gateway to D1, in the shape of Cloudflare's v4 REST API.
//
//   POST …/d1/database/:db/query   {"batch": [["claim", 0, …parameters], ["migration", 1], …]}
//   POST …/d1/database/:db/raw     the same, and rows come as arrays with their columns
//
// It runs the statements of statements.mjs and no others, by section and number. A batch commits as one or not at all.
// The header duly-statements has the caller's digest of them. With the variable ALLOW_SQL = "1", SQL runs too: the body
// or an entry is {"sql", "params"}. Needs the binding DB, the variable DB_ID (:db) and the secret API_TOKEN. May have
// API_TOKEN_2, which is valid too while the token changes, and MAX_BODY_BYTES.
import { DIGEST, MIGRATIONS, SECTIONS } from "./statements.mjs";

const DEFAULT_MAX_BODY_BYTES = 16 * 1024 * 1024;
const ROUTE = /\/d1\/database\/([^/]+)\/(query|raw)$/;
const SHAPE = 'The body must be {"batch": [["section", number, …parameters], ["migration", number], …]}';

export const isGateway = (request) => ROUTE.test(new URL(request.url).pathname);

export async function gateway(request, env) {
  try {
    await authenticate(request, env);
    const raw = route(request, env);
    const { entries, isBatch } = readEntries(await readBody(request, env));
    const statements = entries.flatMap((entry) => statementsOf(entry, request, env));
    const result = await run(env.DB, statements, raw, isBatch);
    return Response.json({ success: true, errors: [], messages: [], result });
  } catch (error) {
    if (error instanceof Refusal) return error.response();
    console.error(error);
    return new Refusal(500, 7500, messageOf(error)).response();
  }
}

class Refusal extends Error {
  constructor(status, code, message, headers = {}) {
    super(message);
    Object.assign(this, { status, code, headers });
  }

  response() {
    const errors = [{ code: this.code, message: this.message }];
    return Response.json({ success: false, errors, messages: [], result: null }, this);
  }
}

// Digests of equal length are compared, so neither content nor length of a token shows in the time taken.
async function authenticate(request, env) {
  const tokens = [env.API_TOKEN, env.API_TOKEN_2].filter(Boolean);
  if (!tokens.length) throw new Refusal(500, 10001, "The gateway has no API_TOKEN and refuses every caller");
  const [, token] = /^Bearer +(\S+)$/i.exec(request.headers.get("authorization") ?? "") ?? [];
  const how = { "www-authenticate": "Bearer" };
  if (!token) throw new Refusal(401, 10000, "Authentication error: no bearer token", how);
  const digest = (text) => crypto.subtle.digest("SHA-256", new TextEncoder().encode(text));
  const [given, ...expected] = await Promise.all([token, ...tokens].map(digest));
  const equal = expected.map((each) => crypto.subtle.timingSafeEqual(given, each));
  if (!equal.includes(true)) throw new Refusal(403, 10000, "Authentication error: wrong token");
}

function route(request, env) {
  const { pathname } = new URL(request.url);
  const [, database, verb] = ROUTE.exec(pathname) ?? [];
  if (!database) throw new Refusal(404, 7003, `Could not route to ${pathname}`);
  if (request.method !== "POST") throw new Refusal(405, 7001, `${request.method} is not taken here`, { allow: "POST" });
  if (database !== env.DB_ID) throw new Refusal(404, 7404, `The database ${database} could not be found`);
  return verb === "raw";
}

// A body that is too large is read to its end and dropped: a caller that is cut off while sending gets no answer.
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

function readEntries(text) {
  let body;
  try {
    body = JSON.parse(text);
  } catch {
    throw new Refusal(400, 7400, "The body is not JSON");
  }
  const isBatch = Array.isArray(body?.batch);
  const entries = isBatch ? body.batch : [body];
  const isEntry = (it) => isSql(it) || (isBatch && isNamed(it));
  if (!entries.length || !entries.every(isEntry)) throw new Refusal(400, 7400, SHAPE);
  return { entries, isBatch };
}

const isValue = (it) => it === null || ["string", "number", "boolean"].includes(typeof it);
const isNamed = (it) => Array.isArray(it) && typeof it[0] === "string" && Number.isInteger(it[1]) && it.every(isValue);
const isParams = (it) => it === undefined || (Array.isArray(it) && it.every(isValue));
const isSql = (it) => typeof it?.sql === "string" && isParams(it.params);

// A migration is all of its statements, with the one before them that checks the schema.
function statementsOf(entry, request, env) {
  if (!Array.isArray(entry)) {
    if (env.ALLOW_SQL !== "1") throw new Refusal(403, 7403, "This gateway runs duly's statements only, by name");
    return [{ sql: entry.sql, params: entry.params ?? [] }];
  }
  const theirs = request.headers.get("duly-statements") || "none";
  const both = `The Worker has the statements ${DIGEST.slice(0, 12)}, the caller ${theirs.slice(0, 12)}`;
  if (theirs !== DIGEST) throw new Refusal(409, 7409, both);
  const [name, number, ...params] = entry;
  if (name === "migration" && MIGRATIONS[number] && !params.length) {
    return MIGRATIONS[number].map((sql) => ({ sql, params }));
  }
  const sql = SECTIONS[name]?.[number];
  if (!sql) throw new Refusal(403, 7403, `duly has no statement ${name} ${number}`);
  return [{ sql, params }];
}

async function run(db, statements, raw, isBatch) {
  try {
    const prepared = statements.map(({ sql, params }) => db.prepare(sql).bind(...params));
    if (raw && !isBatch) return [await runRaw(prepared[0])];
    const answers = await db.batch(prepared);
    return answers.map(({ results, success, meta }) => ({ results: raw ? asArrays(results) : results, success, meta }));
  } catch (error) {
    throw refusalOf(error);
  }
}

// D1 returns the columns of an empty answer only here, and only here no meta.
async function runRaw(statement) {
  const [columns, ...rows] = await statement.raw({ columnNames: true });
  return { results: { columns: columns ?? [], rows }, success: true, meta: {} };
}

const asArrays = (rows) => ({ columns: Object.keys(rows[0] ?? {}), rows: rows.map((row) => Object.values(row)) });

// A mistake in the statement, which no repetition mends; everything else is trouble of the platform.
const MISTAKE = new RegExp(
  "SQLITE_(ERROR|CONSTRAINT|AUTH|TOOBIG|MISMATCH|RANGE)|D1_TYPE_ERROR|^To execute a transaction, please use" +
    "|^Wrong number of parameter bindings|^No SQL statements detected",
);

function refusalOf(error) {
  const message = messageOf(error);
  const isMistake = MISTAKE.test(message);
  if (!isMistake) console.error(message);
  return new Refusal(isMistake ? 400 : 500, 7500, message);
}

const messageOf = (error) => String(error?.message ?? error).replace(/^D1_ERROR: /, "");
