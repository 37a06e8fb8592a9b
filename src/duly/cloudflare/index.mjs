// duly's part of a Worker: the gateway answers its own paths, and your `fetch` every other one.
import { gateway, isGateway } from "./gateway.mjs";

export function duly({ fetch } = {}) {
  return {
    fetch: (request, env, ctx) => (fetch && !isGateway(request) ? fetch(request, env, ctx) : gateway(request, env)),
  };
}
