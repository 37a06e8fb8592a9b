// Your Worker. `duly cloudflare init` wrote this file once and does not change it; duly/ is written each time.
import { duly } from "../duly/index.mjs";

export default duly({
  // Your own routes, beside the gateway's:
  // fetch: (request, env, ctx) => new Response("Hello"),
});
